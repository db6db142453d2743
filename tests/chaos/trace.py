"""What a router heard of requests that failed, and what it made of it: lines of JSON, by the host's
monotonic clock, which every process of a run reads."""

import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from indexer.identity import WorkerKey
from router.decide.core.core import RouterCore
from router.fleet.health.outliers import Standing


def trace(core: RouterCore, file: Path) -> None:
    """Writes a line for each failure and for each change of a worker's standing."""
    out = file.open("ab", buffering=0)
    encode = msgspec.json.encode
    waiting: deque[bytes] = deque(maxlen=100_000)
    outliers: Any = core.fleet.outliers
    failed, change = outliers.on_failed, outliers._on_change

    def write(worker: WorkerKey, **fields: object) -> None:
        line = {"at_s": time.monotonic(), "worker": worker.worker_id, **fields}
        waiting.append(encode(line) + b"\n")
        with suppress(OSError):  # a disk that is full; they go with the next line
            while waiting:
                out.write(waiting[0])
                waiting.popleft()

    def on_failed(
        worker: WorkerKey, fault: str, caller: str, opened_s: float, now_s: float
    ) -> None:
        failed(worker, fault, caller, opened_s, now_s)
        standing: Standing = outliers._standings[worker]
        write(
            worker,
            fault=fault,
            caller=caller,
            opened_s=opened_s - now_s + time.monotonic(),
            failures=standing.failures,
            refusers=sorted(standing.refusers),
            cause=standing.cause,
            accused=standing.accused,
            withheld=dict(outliers.withheld),
        )

    def on_change(worker: WorkerKey) -> None:
        change(worker)
        standing = outliers._ejected.get(worker)
        write(
            worker,
            reason=outliers.reason(worker),
            cause=standing and standing.cause,
            accuser=standing and standing.accuser,
            probing=standing is not None and standing.probing,
            served=standing and standing.served,
        )

    outliers.on_failed, outliers._on_change = on_failed, on_change
