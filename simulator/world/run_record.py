"""The record of a run, request by request, and its RunResult. Pure."""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
from xxhash import xxh3_64

from router.observe.audit.shadow_policy import Agreement, Shadow
from simulator.traffic.results import Columns, Outcome, RunProgress, RunResult, ShadowResult
from simulator.world.options import RunOptions

_LOG = struct.Struct("<Bdqq")


class Happened(IntEnum):
    """Kinds of entries in the log of a run."""

    ARRIVED = 0
    PICKED = 1
    REFUSED = 2
    FIRST_TOKEN = 3
    ENDED = 4
    TROUBLE = 5
    HANDED_OVER = 6
    COPIED = 7


class RunRecord:
    """Columns with an entry for each request, samples of the busy seconds, a digest of the log."""

    def __init__(self, request_count: int, worker_count: int, block_size: int) -> None:
        self.columns = Columns.unknown(request_count)
        self.counters: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.arrived = self.served = self.failed = self.shed = 0
        self._hit_blocks = self._prompt_blocks = 0
        self.request_count = request_count
        self._worker_count = worker_count
        self._block_size = block_size
        self._samples: list[tuple[int, list[int], list[int], list[int]]] = []
        self._log = xxh3_64()

    @property
    def ended(self) -> int:
        return self.served + self.failed + self.shed

    def note(self, kind: Happened, now_s: float, first: int = 0, second: int = 0) -> None:
        """Adds a line to the log, which is kept as a digest only."""
        self._log.update(_LOG.pack(kind, now_s, first, second))

    def serve(self, index: int) -> None:
        """Records that a request was served to its end."""
        self.columns.outcome[index] = Outcome.SERVED
        self.served += 1
        self._hit_blocks += int(self.columns.cached_tokens[index]) // self._block_size
        self._prompt_blocks += int(self.columns.prompt_tokens[index]) // self._block_size

    def fail(self, index: int, reason: str) -> None:
        """Records that a request got an error."""
        self.columns.outcome[index] = Outcome.FAILED
        self.failures[reason] += 1
        self.failed += 1

    def turn_away(self, index: int) -> None:
        """Records that a request was refused for lack of capacity until its client gave up."""
        self.columns.outcome[index] = Outcome.SHED
        self.shed += 1

    def sample(
        self, second: int, in_flight: list[int], waiting: list[int], used_blocks: list[int]
    ) -> None:
        """Records each worker's load at a full second; seconds without a record had no load."""
        self._samples.append((second, in_flight, waiting, used_blocks))

    def progress(self) -> RunProgress:
        """The progress of the run."""
        hit_rate = self._hit_blocks / self._prompt_blocks if self._prompt_blocks else 0.0
        in_flight = self.arrived - self.ended
        return RunProgress(self.request_count, self.ended, self.failed, in_flight, hit_rate)

    def result(
        self,
        options: RunOptions,
        workers: Sequence[str],
        shadows: Mapping[str, Shadow],
        wall_s: float,
    ) -> RunResult:
        """The result of the run."""
        rows = [sample[1:] for sample in self._samples]
        matrices = np.array(rows, np.int64).reshape(-1, 3, self._worker_count)
        return RunResult(
            policy=options.policy,
            order=options.queue.order,
            workers=workers,
            block_size=self._block_size,
            sampled_s=np.array([sample[0] for sample in self._samples], np.int64),
            in_flight=matrices[:, 0],
            wall_s=wall_s,
            counters=dict(self.counters),
            failures=dict(self.failures),
            waiting=matrices[:, 1],
            used_blocks=matrices[:, 2],
            shadows={name: _watched(shadow) for name, shadow in shadows.items()},
            digest=self._log.intdigest(),
            **vars(self.columns),
        )


def _watched(shadow: Shadow) -> ShadowResult:
    decisions = shadow.decisions
    return ShadowResult(
        decisions=decisions.total() - decisions[Agreement.FAILED],
        agreements=decisions[Agreement.SAME] + decisions[Agreement.TIED],
        predicted_tokens_more=round(shadow.overlap_tokens.gain - shadow.overlap_tokens.loss),
        predicted_s_sooner=shadow.ttft_s.gain - shadow.ttft_s.loss,
    )
