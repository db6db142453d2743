"""Reasons why a live worker can't take a request."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.table import Column, Flags
from router.request.request import Request, Role

DRAINED = "drained"
TOO_LONG = "prompt too long"
NOT_A_NUMBER = "cost is not a number"
"""Reason of a row to which the policy gave the cost NaN; another policy may give it a number."""
LORA_ELSEWHERE = "another worker has the LoRA loaded"
KEPT_MAX = 64
"""Results that Exclusions keeps, and LoRAs that Loras keeps: 8 KB each, of 1,000 workers."""
NARROWING_MAX = 64
"""Most workers and labels that a request may name for its exclusions to be kept for later ones."""
OUTPUT_TOKENS_MAX = 4096
"""Bound on a request's expected output, in tokens; a larger expectation counts as this."""


class Barred:
    """Rows of a pool that must not be picked, each with its reason."""

    __slots__ = ("_make", "_reasons", "counts", "mask")

    def __init__(
        self,
        mask: npt.NDArray[np.bool_] | None,
        counts: Mapping[str, int],
        make: Callable[[], Sequence[str]],
    ) -> None:
        """mask: True for each row that is barred; None: no row is. counts: number of rows by
        reason. make: returns the reason of each row, empty where it is not barred; called at the
        first use.
        """
        self.mask = mask
        self.counts = counts
        self._make = make
        self._reasons: Sequence[str] | None = None

    @classmethod
    def of(cls, reasons: Sequence[str]) -> "Barred":
        """The workers of a pool that can't be picked. reasons: why, for each row of the pool;
        empty: the worker may be picked."""
        counts = Counter(filter(None, reasons))
        mask = np.array([bool(reason) for reason in reasons], np.bool_) if counts else None
        return cls(mask, counts, lambda: reasons)

    @property
    def reasons(self) -> Sequence[str]:
        """Reason that bars each row, empty where it may be picked."""
        if self._reasons is None:
            self._reasons = self._make()
        return self._reasons

    def can(self, rows: int) -> Flags:
        """True for each row that may be picked."""
        return np.ones(rows, np.bool_) if self.mask is None else ~self.mask

    def narrowed(self, to: Flags, otherwise: str) -> "Barred":
        """These barred rows, and all others where `to` is False, barred for reason `otherwise`."""
        others = ~to if self.mask is None else ~(to | self.mask)
        count = int(np.count_nonzero(others))
        if not count:
            return self
        mask = others if self.mask is None else others | self.mask
        counts = {**self.counts, otherwise: self.counts.get(otherwise, 0) + count}
        return Barred(mask, counts, lambda: self._with(others, otherwise))

    def _with(self, others: Flags, otherwise: str) -> list[str]:
        return [
            otherwise if other else reason
            for reason, other in zip(self.reasons, others.tolist(), strict=True)
        ]


class Exclusions:
    """Reasons why workers can't take requests. A result is kept for the next request with the same
    requirements and pool, while no worker is drained and the prompts fit all workers.
    """

    def __init__(self, drained: Collection[str]) -> None:
        """drained: ids of drained workers, which its owner may change between calls."""
        self._drained = drained
        self._kept: dict[Hashable, tuple[Pool, Barred]] = {}
        """A request's model, role, block size and narrowing -> the last pool for it, and the rows
        barred there."""

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, request: Request, output_tokens: int, pool: Pool) -> Barred:
        """Rows of a pool that can't take a request. output_tokens: expected length of its
        answer.
        """
        narrowing, prompt = request.narrowing, request.prompt
        keeps = not self._drained and prompt.token_count + output_tokens <= pool.shortest_len
        if narrowing is not None and narrowing.names > NARROWING_MAX:
            keeps = False
        wanted = request.model, request.role, prompt.only_block_size, narrowing
        kept = self._kept.get(wanted) if keeps else None
        if kept is not None and kept[0] is pool:
            return kept[1]
        barred = Barred.of(
            [exclusion(request, output_tokens, source, self._drained) for source in pool.sources]
        )
        if keeps:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[wanted] = pool, barred
        return barred


def answering_first(barred: Barred, last: Sequence[str]) -> Barred:
    """Adds workers of the last resort to the barred rows, if any other worker may be picked, or
    could be if it had room. last: for each row, why it is a last resort; empty: it answers.
    """
    if not any(last):
        return barred
    pairs = list(zip(barred.reasons, last, strict=True))
    if any(not reason and not kept_out for reason, kept_out in pairs):
        return Barred.of([reason or kept_out for reason, kept_out in pairs])
    return barred


def loaded_first(barred: Barred, lora_name: str, pool: Pool, full: Column) -> Barred:
    """Adds workers that would have to load the LoRA to the barred rows, while a worker that lists
    it may be picked and has room: a load costs time, and may evict another LoRA that is in use.
    full: for each row, 0 where the worker has room.
    """
    of_lora = pool.made(Loras).of(lora_name)
    if of_lora is None:
        return barred
    lists, would_load = of_lora
    can = lists & barred.can(len(pool)) & (full == 0)
    return barred.narrowed(~would_load, LORA_ELSEWHERE) if can.any() else barred


class Loras:
    """The workers of a pool that list a LoRA, and those that would load it."""

    def __init__(self, pool: Pool) -> None:
        self._heartbeats = [heartbeat_of(source) for source in pool.sources]
        self._loading = any(heartbeat.loads_loras for heartbeat in self._heartbeats)
        self._known: dict[str, tuple[Flags, Flags]] = {}

    def of(self, lora_name: str) -> tuple[Flags, Flags] | None:
        """Two columns: True where the LoRA is listed, and where it would be loaded. None: no worker
        of the pool loads LoRAs.
        """
        if not self._loading:
            return None
        known = self._known.get(lora_name)
        if known is None:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            lists = [lora_name in heartbeat.lora_names for heartbeat in self._heartbeats]
            loads = [would_load(heartbeat, lora_name) for heartbeat in self._heartbeats]
            known = np.array(lists, np.bool_), np.array(loads, np.bool_)
            self._known[lora_name] = known
        return known


def would_load(heartbeat: Heartbeat, lora_name: str) -> bool:
    """Whether an engine has to load a LoRA for a request, and does so on demand."""
    return heartbeat.loads_loras and lora_name not in heartbeat.lora_names


def too_long(request: Request, output_tokens: int, heartbeat: Heartbeat) -> bool:
    """Whether prompt and expected output together exceed the engine's max_model_len, if known."""
    tokens = request.prompt.token_count + output_tokens
    return heartbeat.max_model_len > 0 and tokens > heartbeat.max_model_len


def exclusion(request: Request, output_tokens: int, source: Source, drained: Container[str]) -> str:
    """Reason why a worker can't take the request; empty when it can."""
    heartbeat = heartbeat_of(source)
    worker_id = source.key.worker_id
    narrowing = request.narrowing
    if worker_id in drained:
        return DRAINED
    if heartbeat.role not in (request.role, Role.BOTH):
        return f"role is {heartbeat.role}"
    if narrowing is not None and (reason := narrowing.excludes(worker_id, heartbeat)):
        return reason
    if too_long(request, output_tokens, heartbeat):
        return TOO_LONG
    block_size = request.prompt.only_block_size
    return "block size differs" if block_size not in (0, heartbeat.block_size) else ""
