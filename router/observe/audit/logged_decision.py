"""A line of the decision log: one decision as JSON, and the candidates made of a line. Pure.

A line has all that policies read of the workers, so that another policy's choice can be computed
from it. It has no prompt, no tokens, no session and no tenant; hashes of prompt and session only
where the operator asks for them.

Law: the candidates of a line get the same costs from the same policy, to the last bit.
"""

from collections.abc import Iterable, Mapping, Sized
from functools import lru_cache
from math import isfinite, nan
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from typing_extensions import override

from events.feed.fleet_view import Source
from events.feed.stream import Stream
from events.plane.facts import Epoch, Heartbeat
from indexer.identity import WorkerKey
from router.config.settings.routing_settings import GuardSettings
from router.decide.decision.decision import Decision, Overlap
from router.decide.policies.candidates import Candidates
from router.fleet.eligibility import Barred
from router.fleet.on_demand import Further
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.rates import PrefillColumns, PrefillRates
from router.fleet.table import COLUMNS, NUMBERS_FROM, Column, Flags
from router.fleet.topology import PLACES
from router.request.prompt import Prompt
from router.request.request import Request

VERSION = 1

Numbers: TypeAlias = list[float | None]
"""One number for each row; None: unknown."""
Tokens = Annotated[int, Meta(ge=0, lt=1 << 31)]


class NoHashes(LookupError):
    """A policy needs a hash that the line does not have."""


class LoggedRates(msgspec.Struct, frozen=True):
    """The prefill rates and waits of a line's rows: see router/fleet/rates.py, PrefillColumns."""

    mean_work: float
    rate: list[float]
    wait_s: list[float]
    tokens: list[float]
    count: list[float]


class LoggedDecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the decision log. Lists have an entry for each row, which is a candidate; columns
    of zeros are left out, and columns of numbers that no engine has."""

    v: int
    at_s: float
    """Unix time."""
    replica: str
    request_id: str
    model: str
    policy: str
    """Name of the policy that decided."""
    prompt_tokens: int
    workers: list[tuple[str, int]]
    """Worker id and rank of each row."""
    picked: int | None
    """The picked row; None: no worker could be picked, and the line is part of a refusal's."""
    tied: int
    """Rows that shared the lowest cost."""
    costs: Numbers
    columns: dict[str, Numbers]
    """Columns of router/decide/policies/candidates.py, by name."""
    overlap_tokens: dict[str, list[Tokens]]
    """Tokens of overlap: raw, usable, and by tier; before they are multiplied by trust."""
    prefill: LoggedRates
    reservation_id: str = ""
    """Id of the pick's reservation; empty: no worker was picked."""
    parameters: dict[str, float] = {}
    """Parameters of the policy."""
    excluded: list[tuple[int, str]] = []
    """Rows that could not be picked, each with its reason."""
    blocks_in_use: list[float] = []
    others_waiting: list[float] = []
    recent_blocks: list[float] = []
    invested_tokens: list[float] = []
    kv_distance: list[float] = []
    own_numbers: dict[str, Numbers] = {}
    """The operator's own numbers (events/engines/numbers.py), by name; all that some engine has."""
    of_session: list[int] = []
    """Rows of the worker to which the session's last request went; empty: none."""
    places: list[tuple[str, str, str]] = []
    """Host, rack and cluster of each row, from workers' labels; empty: no worker has these."""
    output_tokens: int | None = None
    """Output tokens that the request expected."""
    guard: GuardSettings | None = None
    """Guard by which picks were moved; None: no guard, or a release that had none."""
    cheapest: int | None = None
    """The row that would have been picked by its cost, where the guard moved the pick."""
    affinity_bonus: float | None = None
    """Cost subtracted for the row of_session; None: none was, or the release had no affinity."""
    affinity_key: str | None = None
    """Hash of the session or the prompt, 16 hexadecimal digits, if hashes are logged."""
    prefixes: str | None = None
    """PrefixHashes, 16 hexadecimal digits each, if hashes are logged."""


def capture(decision: Decision, replica: str, hashes: bool) -> LoggedDecision:
    """Takes from a decision what its line needs; call it before anything of the decision is
    reserved.

    hashes: whether to take those of prompt and session, too.
    """
    rows, request = decision.rows, decision.request
    prefill = rows.prefill
    sizes = [heartbeat_of(source).block_size for source in decision.sources]
    prefixes = request.prompt.prefixes(min((size for size in sizes if size), default=0))
    return LoggedDecision(
        v=VERSION,
        at_s=decision.decided_at_s,
        replica=replica,
        request_id=request.request_id,
        reservation_id=decision.reservation_id,
        model=request.model,
        policy=decision.policy.name,
        prompt_tokens=rows.prompt_tokens,
        workers=[(key.worker_id, key.dp_rank) for key in rows.workers],
        picked=decision.order[0] if decision.order else None,
        tied=decision.tied,
        costs=_numbers(decision.scores.costs),
        parameters=dict(decision.policy.parameters),
        columns={
            name: _numbers(column)
            for name, column, unsaid in zip(COLUMNS, rows.table, _UNSAID, strict=True)
            if not np.array_equal(column, np.full(len(rows), unsaid), equal_nan=True)
        },
        overlap_tokens={
            name: column.tolist()
            for name, column in zip(Overlap._fields, decision.tokens, strict=True)
            if column.any()
        },
        prefill=LoggedRates(
            prefill.mean_work,
            prefill.rate.tolist(),
            prefill.wait_s.tolist(),
            prefill.tokens.tolist(),
            prefill.count.tolist(),
        ),
        excluded=[(row, why) for row, why in enumerate(decision.excluded) if why],
        blocks_in_use=_unless_zero(rows.prompt_blocks - rows.new_blocks),
        others_waiting=_unless_zero(rows.others_waiting),
        recent_blocks=_unless_zero(rows.recent_blocks),
        invested_tokens=_unless_zero(rows.invested_tokens),
        kv_distance=_unless_zero(rows.kv_distance),
        own_numbers=_own_numbers(rows, decision.sources),
        of_session=np.flatnonzero(rows.of_session).tolist(),
        places=_places([heartbeat_of(source).labels for source in decision.sources]),
        output_tokens=request.expected_output_tokens,
        guard=decision.guard,
        cheapest=decision.guarded.cheapest if decision.guarded else None,
        affinity_bonus=decision.policy.affinity_bonus or None,
        affinity_key=f"{rows.affinity_key:016x}" if hashes else None,
        prefixes=prefixes.astype(">u8").tobytes().hex() if hashes else None,
    )


def encode(line: msgspec.Struct) -> bytes:
    """The line as JSON, with its line end."""
    return msgspec.json.encode(line) + b"\n"


def decode(content: bytes) -> LoggedDecision:
    """Reads a line; raises ValueError for an invalid or inconsistent one."""
    line = checked(_DECODER.decode(content))
    if line.picked is None:
        raise ValueError("the line is of a decision without a pick, and is no refusal")
    return line


def checked(line: LoggedDecision) -> LoggedDecision:
    """Returns the line if it is consistent; raises ValueError otherwise."""
    count = len(line.workers)
    rates = line.prefill
    columns: list[Sized] = [line.costs, *line.columns.values(), *line.overlap_tokens.values()]
    columns += line.own_numbers.values()
    columns += [rates.rate, rates.wait_s, rates.tokens, rates.count]
    columns += filter(None, (line.blocks_in_use, line.others_waiting, line.recent_blocks))
    columns += filter(None, (line.invested_tokens, line.kv_distance, line.places))
    if line.v != VERSION:
        raise ValueError(f"the line has version {line.v}, but this release reads version {VERSION}")
    if any(len(column) != count for column in columns):
        raise ValueError(f"a column's length differs from the number of workers, {count}")
    picked = [row for row in (line.picked, line.cheapest) if row is not None]
    rows = (*picked, *line.of_session, *(row for row, _ in line.excluded))
    if line.prompt_tokens < 1 or not all(0 <= row < count for row in rows):
        raise ValueError("the line names a row that does not exist, or its prompt has no tokens")
    if not all(rate > 0 and isfinite(rate) for rate in line.prefill.rate):
        raise ValueError("a prefill rate in the line is not above 0")
    return line


def candidates(line: LoggedDecision) -> Candidates:
    """The candidates that the policy saw, made from the line."""
    count = len(line.workers)
    table = np.tile(np.array(_UNSAID)[:, np.newaxis], count)
    for i, name in enumerate(COLUMNS):
        if name in line.columns:
            table[i] = _floats(line.columns[name])
    tokens = np.zeros((len(Overlap._fields), count), np.int32)
    for i, name in enumerate(Overlap._fields):
        if name in line.overlap_tokens:
            tokens[i] = line.overlap_tokens[name]
    sizes = tuple(map(int, table[COLUMNS.index("block_size")].tolist()))
    pool = _pool(tuple(line.workers), sizes, tuple(line.places))
    return _LoggedCandidates(line, pool, table, tokens)


def reasons(line: LoggedDecision) -> list[str]:
    """Reason for each row why it could not be picked; empty where it could."""
    excluded = [""] * len(line.workers)
    for row, why in line.excluded:
        excluded[row] = why
    return excluded


_UNSAID = [0.0] * NUMBERS_FROM + [nan] * (len(COLUMNS) - NUMBERS_FROM)
"""Value of each of COLUMNS in all rows, where a line leaves the column out."""
_SOME_SESSION = "logged"
"""Stands for the id of a session, which lines don't have."""
_DECODER = msgspec.json.Decoder(LoggedDecision)


class _LoggedCandidates(Candidates):
    """Candidates whose further columns and hashes are those of the line."""

    __slots__ = ("_line",)

    def __init__(
        self,
        line: LoggedDecision,
        pool: Pool,
        table: npt.NDArray[np.float64],
        tokens: npt.NDArray[np.int32],
    ) -> None:
        super().__init__(
            barred=Barred.of(reasons(line)),
            table=table,
            request=Request(
                line.request_id,
                Prompt(line.prompt_tokens),
                line.model,
                expected_output_tokens=line.output_tokens,
                session_id=_SOME_SESSION if line.of_session else "",
            ),
            tokens=tokens,
            pool=pool,
            further=Further({}, PrefillRates(1.0)),
            now_s=line.at_s,
            kv_distance=np.array(line.kv_distance) if line.kv_distance else None,
            invested_tokens=np.array(line.invested_tokens) if line.invested_tokens else None,
        )
        self._line = line

    @property
    @override
    def affinity_key(self) -> int:
        if self._line.affinity_key is None:
            raise NoHashes("this policy needs hashes, which the log lacks: see decision_log.hashes")
        return int(self._line.affinity_key, 16)

    @property
    @override
    def blocks_in_use(self) -> Column:
        return _column(self._line.blocks_in_use, len(self))

    @property
    @override
    def others_waiting(self) -> Column:
        return _column(self._line.others_waiting, len(self))

    @property
    @override
    def recent_blocks(self) -> Column:
        return _column(self._line.recent_blocks, len(self))

    @override
    def own_number(self, name: str) -> Column:
        return np.array(_floats(self._line.own_numbers.get(name, [None] * len(self))))

    @property
    @override
    def of_session(self) -> Flags:
        flags = np.zeros(len(self), np.bool_)
        flags[self._line.of_session] = True
        return flags

    @property
    @override
    def prefill(self) -> PrefillColumns:
        prefill = self._line.prefill
        return PrefillColumns(
            prefill.mean_work,
            np.array(prefill.rate),
            np.array(prefill.wait_s),
            np.array(prefill.tokens),
            np.array(prefill.count),
        )


@lru_cache(maxsize=64)
def _pool(
    workers: tuple[tuple[str, int], ...],
    block_sizes: tuple[int, ...],
    places: tuple[tuple[str, str, str], ...],
) -> Pool:
    """A pool of workers of which only names, block sizes and places (host, rack, cluster) are
    known."""
    sources = []
    for row, (worker, size) in enumerate(zip(workers, block_sizes, strict=True)):
        labels = dict(zip(PLACES, places[row], strict=True)) if places else {}
        source = Source(WorkerKey(*worker), row, Stream(1.0, 0.0))
        source.heartbeat = Heartbeat(
            epoch=Epoch(1, 1),
            address="",
            engine="",
            block_size=size,
            labels=labels,
            sent_at_s=0.0,
        )
        sources.append(source)
    return Pool.of(sources)


def _column(numbers: list[float], count: int) -> Column:
    return np.array(numbers) if numbers else np.zeros(count)


def _numbers(column: Column) -> Numbers:
    return [number if isfinite(number) else None for number in column.tolist()]


def _floats(numbers: Numbers) -> list[float]:
    return [nan if number is None else number for number in numbers]


def _own_numbers(rows: Candidates, sources: Iterable[Source]) -> dict[str, Numbers]:
    names = {name for source in sources for name in heartbeat_of(source).own_numbers}
    return {name: _numbers(rows.own_number(name)) for name in sorted(names)}


def _unless_zero(column: Column) -> list[float]:
    numbers: list[float] = column.tolist() if column.any() else []
    return numbers


def _places(labels: list[Mapping[str, str]]) -> list[tuple[str, str, str]]:
    if not any(name in of_worker for of_worker in labels for name in PLACES):
        return []
    return [
        (of_worker.get("host", ""), of_worker.get("rack", ""), of_worker.get("cluster", ""))
        for of_worker in labels
    ]
