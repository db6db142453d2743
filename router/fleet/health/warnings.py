"""Faults of a worker that an operator should mend: a code for machines, a sentence for people.

Pure. `warnings_of` returns the present faults; WarningLog chooses those that get a log line.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from typing_extensions import override

from events.engines.endpoints import masked
from events.engines.table import engine_of
from events.feed.fleet_view import FleetView, Source
from events.feed.stream import PAUSE_MAX_S, StreamState
from events.plane.facts import Heartbeat
from events.plane.left_out import REASONS
from indexer.identity import WorkerKey
from router.fleet.health.self_check import Record, SelfCheck
from router.fleet.reservations.load import WorkerLoad
from router.request.request import Role

CLOCK_SKEW_S = 5.0
"""Seconds by which the clocks of a relay and of this router must differ for a warning."""
UNHEARD_S = 30.0
"""Seconds after a worker's first pick without any KV event, for a warning; a long prompt takes so
long."""
PARTIAL_S = 600.0
NEVER_RUN = 20
"""Reports of cached tokens in a row that contradict the index, for a warning."""
STALE_RESYNCS = 2
"""Resyncs in a row after which predictions were still wrong, for a warning."""
RELAY_SENTENCES_MAX = 16
SENTENCE_MAX = 300
"""Characters that are kept of a relay's warning, since it comes over the network."""
LOOK_S = 1.0
REPEAT_S = 600.0
LINES_MAX = 10


_EAGLE = (
    " Or does its model run with EAGLE? Dynamo's hashes then cover a token more than a block, and"
    " can't be matched."
)


class WarningCode(StrEnum):
    """The kind of a worker's fault; its values are values of a metric's label."""

    NO_EVENTS = "no_events"
    BLOCK_SIZE = "block_size"
    HASHES_NEVER_MATCH = "hashes_never_match"
    STALE = "stale"
    NO_HEARTBEAT = "no_heartbeat"
    CLOCK_SKEW = "clock_skew"
    TWO_RELAYS = "two_relays"
    UNSTEADY = "unsteady"
    PARTIAL = "partial"
    LEFT_OUT = "left_out"
    ENGINE_VERSION = "engine_version"
    APPROXIMATE = "approximate"
    RELAY = "relay"
    RELAY_FAILING = "relay_failing"
    RANKS = "ranks"
    TOKENS_DIFFER = "tokens_differ"
    TOKENS_UNPROVEN = "tokens_unproven"
    PRIORITY_IGNORED = "priority_ignored"
    BLOCKS_UNKNOWN = "blocks_unknown"


SAID_ONCE = frozenset({WarningCode.PRIORITY_IGNORED})
"""Codes of warnings about what may be intended: each sentence is logged once in a router's life."""
SAID_ONCE_MAX = 64
"""Sentences with a code of SAID_ONCE that are logged; further ones are not."""
RELAY_CODES = {"relay_failing": WarningCode.RELAY_FAILING, "ranks": WarningCode.RANKS}
"""Code in a relay's heartbeat -> code of the warning; all other codes count as `relay`."""


class WorkerWarning(NamedTuple):
    """A worker's fault that an operator should mend."""

    code: WarningCode
    sentence: str


class Experience(NamedTuple):
    """What this router observed of a worker, besides the heartbeats of its relay."""

    record: Record
    unheard_s: float | None
    """Seconds since the worker's first pick, while its stream is empty; None: it was not picked, or
    its stream is not empty."""
    is_complete: bool
    """False: the index may lack blocks that the engine holds."""
    block_sizes: Mapping[int, int]
    """Canonical block size -> number of workers of the same model with it."""
    lacks: tuple[str, ...] = ()
    """Reasons for which the worker's stream leaves out blocks (events/plane/left_out.py)."""


def warnings_of(source: Source, known: Experience, now_s: float) -> list[WorkerWarning]:
    """Present faults of a worker; none before its first heartbeat."""
    heartbeat = source.heartbeat
    if heartbeat is None:
        return []
    return [
        *_of_its_relay(source, heartbeat, now_s),
        *_of_its_blocks(heartbeat, known),
        *_of_its_stream(source, heartbeat, known, now_s),
    ]


def _of_its_relay(source: Source, heartbeat: Heartbeat, now_s: float) -> Iterator[WorkerWarning]:
    if source.heartbeat_overdue:
        yield WorkerWarning(
            WarningCode.NO_HEARTBEAT,
            f"its stream beats, but no heartbeat of its relay could be read for"
            f" {now_s - source.heartbeat_at_s:.0f} s, so that its address and load may have"
            " changed: it gets only requests that no other worker may take; see"
            " kvroute_facts_dropped_total",
        )
    sentences = heartbeat.warnings[:RELAY_SENTENCES_MAX]
    for sentence, code in zip_longest(sentences, heartbeat.warning_codes[: len(sentences)]):
        known = RELAY_CODES.get(code, WarningCode.RELAY)
        # Older relays don't mask passwords in URLs.
        yield WorkerWarning(known, masked(sentence[:SENTENCE_MAX]))
    if source.stream.two_relays(now_s):
        yield WorkerWarning(
            WarningCode.TWO_RELAYS,
            "two relays speak for this worker: the older one is ignored; stop one of them",
        )
    if count := source.stream.in_vain(now_s):
        yield WorkerWarning(
            WarningCode.UNSTEADY,
            f"its stream was read again {count} times in a row and never stays right, so there are"
            f" pauses of up to {PAUSE_MAX_S:g} s between two attempts: does its relay lose"
            " messages, send more than one publisher may, or count its blocks wrongly?",
        )
    if abs(source.clock_skew_s) > CLOCK_SKEW_S:
        yield WorkerWarning(
            WarningCode.CLOCK_SKEW,
            f"its relay's clock differs from ours by {source.clock_skew_s:.0f} s: times in logs and"
            " stream lags mislead",
        )
    engine = engine_of(heartbeat.engine)
    if engine.is_untried(heartbeat.engine_version):
        yield WorkerWarning(
            WarningCode.ENGINE_VERSION,
            f"{heartbeat.engine} {heartbeat.engine_version[:32]} is older than"
            f" {'.'.join(map(str, engine.first_version))}, the first release whose KV events"
            " kvroute was tried with",
        )


def _of_its_blocks(heartbeat: Heartbeat, known: Experience) -> Iterator[WorkerWarning]:
    size, engine_size = heartbeat.block_size, heartbeat.engine_block_size
    if not size and engine_size:
        yield WorkerWarning(
            WarningCode.BLOCK_SIZE,
            f"its engine's blocks of {engine_size} tokens fit no canonical block size, so that"
            " nothing it holds is known: choose a block_size that divides them or that they divide",
        )
    elif not size and known.unheard_s is not None and known.unheard_s >= UNHEARD_S:
        yield WorkerWarning(
            WarningCode.BLOCK_SIZE,
            "it gets requests, but its block size is unknown: neither its events nor its metrics"
            " name it",
        )
    elif size and len(known.block_sizes) > 1 and size not in _only_commonest(known.block_sizes):
        others = ", ".join(
            f"{count} of {other}" for other, count in sorted(known.block_sizes.items())
        )
        yield WorkerWarning(
            WarningCode.BLOCK_SIZE,
            f"its blocks are of {size} tokens, but workers of its model have different canonical"
            f" block sizes ({others}): every prompt is hashed once a size, and block_hashes reach"
            " workers of one size only; set the relays' block_size",
        )
    if size and not heartbeat.total_blocks:
        yield WorkerWarning(
            WarningCode.BLOCKS_UNKNOWN,
            "nothing says how many KV blocks it has, so that policies can't see how full it is:"
            " measured, prompts took a fifth to a third longer to their first token; set"
            " total_blocks (`workers[]`, or --total-blocks of its relay)",
        )


def _of_its_stream(
    source: Source, heartbeat: Heartbeat, known: Experience, now_s: float
) -> Iterator[WorkerWarning]:
    if not heartbeat.events:
        yield WorkerWarning(
            WarningCode.APPROXIMATE,
            "its engine publishes no KV events: what it holds is guessed from our own picks",
        )
        return
    stream, record = source.stream, known.record
    if stream.state is not StreamState.LIVE:
        return  # nothing is claimed of it
    engine = engine_of(heartbeat.engine)
    silent_by_nature = heartbeat.role == Role.DECODE and not engine.decode_caches
    if known.unheard_s is not None and known.unheard_s >= UNHEARD_S and not silent_by_nature:
        yield WorkerWarning(
            WarningCode.NO_EVENTS,
            "it gets requests, but its engine has published no KV event: is its"
            " --kv-events-config set and its prefix caching on, and is the relay's events endpoint"
            " this engine's own?",
        )
    if not stream.complete and now_s - stream.changed_at_s >= PARTIAL_S:
        yield WorkerWarning(
            WarningCode.PARTIAL,
            "its stream is partial: blocks that were stored before its relay listened, or that it"
            " lost track of, are missing until the engine evicts them or clears its cache",
        )
    if stream.complete and known.lacks:
        reasons = "; ".join(
            REASONS.get(reason, f"{reason[:64]!r}, which a later kvroute knows")
            for reason in known.lacks
        )
        yield WorkerWarning(
            WarningCode.LEFT_OUT,
            f"blocks that its engine holds are missing from the index: {reasons}",
        )
    if record.blind_run >= NEVER_RUN and known.is_complete:
        yield WorkerWarning(
            WarningCode.HASHES_NEVER_MATCH,
            "its engine reuses blocks of our prompts, but none of them is ever in the index: do"
            " clients send the token ids that the engine sees (chat template, first token), with"
            " their lora_name, cache_salt and multimodal items?"
            + (_EAGLE if engine.eagle_shifts_hashes else ""),
        )
    if record.phantom_run >= NEVER_RUN:
        yield WorkerWarning(
            WarningCode.HASHES_NEVER_MATCH,
            "0 cached tokens are reported again and again for prompts that the index says it holds:"
            " does its engine tell them (vLLM --enable-prompt-tokens-details, SGLang"
            " --enable-cache-report), do the requests ask for prompt log probabilities, or does"
            " its relay listen to another engine?",
        )
    if record.resyncs >= STALE_RESYNCS:
        yield WorkerWarning(
            WarningCode.STALE,
            "its engine reuses less than the index says it holds, and reading its stream again has"
            " not helped: its relay has lost track, or its engine doesn't use what it announces",
        )


def _only_commonest(block_sizes: Mapping[int, int]) -> list[int]:
    """The block size that most workers have, as a list; empty where several are as common."""
    most = max(block_sizes.values())
    sizes = [size for size, count in block_sizes.items() if count == most]
    return sizes if len(sizes) == 1 else []


class FleetWatch:
    """Keeps what warnings need to know of all workers."""

    def __init__(
        self, view: FleetView, self_check: SelfCheck, canonical: Callable[[str], str]
    ) -> None:
        """canonical: returns the canonical name of a model from any of its names."""
        self._view = view
        self._self_check = self_check
        self._canonical = canonical
        self._looked_at_s = -inf
        self._block_sizes: dict[str, Counter[int]] = {}
        """Model -> canonical block size -> number of workers."""
        self._unheard: dict[WorkerKey, tuple[int, float | None]] = {}
        """Worker with an empty stream -> number of its last pick when this was first noticed, and
        when a later pick was noticed; None: not yet."""

    def on_tick(self, loads: Mapping[WorkerKey, WorkerLoad], now_s: float) -> None:
        """Updates what is known of every worker, once in LOOK_S seconds at most."""
        if now_s - self._looked_at_s < LOOK_S:
            return
        self._looked_at_s = now_s
        sizes: dict[str, Counter[int]] = {}
        unheard: dict[WorkerKey, tuple[int, float | None]] = {}
        for key, source in self._view.sources.items():
            heartbeat = source.heartbeat
            if heartbeat is not None and heartbeat.block_size:
                of_model = sizes.setdefault(self._canonical(heartbeat.model), Counter())
                of_model[heartbeat.block_size] += 1
            if source.stream.seq or self._view.index.told(source.slot):
                continue
            last_picked = loads[key].last_picked if key in loads else 0
            before, since_s = self._unheard.get(key, (last_picked, None))
            if since_s is None and last_picked > before:
                since_s = now_s
            unheard[key] = before, since_s
        self._block_sizes, self._unheard = sizes, unheard

    def warnings(self, source: Source, now_s: float) -> list[WorkerWarning]:
        """Present faults of a worker."""
        _, since_s = self._unheard.get(source.key, (0, None))
        model = self._canonical(source.heartbeat.model) if source.heartbeat is not None else ""
        known = Experience(
            self._self_check.record(source.key),
            None if since_s is None else now_s - since_s,
            self._view.complete(source) and not source.approximate,
            self._block_sizes.get(model, {}),
            self._view.lacks(source),
        )
        return warnings_of(source, known, now_s)


class WarningLog:
    """Turns present faults into log lines, without repeating them often.

    A worker's code gets a line when it appears, and again after REPEAT_S if it still holds; a
    sentence of SAID_ONCE gets one line for all workers.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[WorkerKey, WarningCode], float] = {}
        """Worker and code -> when the warning last got a line, or was counted in a last line; those
        of the last REPEAT_S."""
        self._said_once: set[str] = set()

    @override
    def __repr__(self) -> str:
        return f"<WarningLog {len(self._said)} said lately>"

    def lines(self, warnings: Iterable[tuple[WorkerKey, WorkerWarning]], now_s: float) -> list[str]:
        """Log lines, LINES_MAX at most, and one more with the number of those left out."""
        self._said = {
            warning: said_s for warning, said_s in self._said.items() if now_s - said_s < REPEAT_S
        }
        fresh: dict[tuple[WorkerKey, WarningCode], list[str]] = {}
        for key, (code, sentence) in warnings:
            if code in SAID_ONCE and not self._is_first(sentence):
                continue
            if (key, code) not in self._said:
                fresh.setdefault((key, code), []).append(sentence)
        self._said.update(dict.fromkeys(fresh, now_s))
        lines = [
            f"worker {key}: {'; '.join(sentences)} ({code})"
            for (key, code), sentences in fresh.items()
        ]
        if len(lines) > LINES_MAX:
            more = len(lines) - LINES_MAX
            lines[LINES_MAX:] = [f"{more} more warnings of workers: `kvroute workers` shows all"]
        return lines

    def _is_first(self, sentence: str) -> bool:
        """Whether a sentence was not logged before, and SAID_ONCE_MAX lets it be logged now."""
        if sentence in self._said_once or len(self._said_once) >= SAID_ONCE_MAX:
            return False
        self._said_once.add(sentence)
        return True
