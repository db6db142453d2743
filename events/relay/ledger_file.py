"""Keeps a rank's map (events/relay/saved_ledger.py) on disk for the relay's next life.

One file a rank, there whole or not at all: it is written beside the old one and takes its name.
Reading, writing and encoding have threads of their own; what fails is counted, and never ends a
relay.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from events.plane.subjects import escape
from events.plane.supervisor import Supervisor
from events.relay.ledger import Ledger
from events.relay.ledger_copy import LedgerCopy
from events.relay.rank import Rank
from events.relay.saved_ledger import Checkpoint, Source, pack, unpack
from indexer.identity import WorkerKey

KEEP_S = 30.0
"""Between two times that a map is written. The replay socket has to reach back so far."""
SAVE_SHARE = 0.02
"""Of the time, that may go into it at most."""
FILE_BYTES_MAX = 1 << 30
"""Four million blocks, the most a ledger holds, are a quarter of it."""
_READABLE_CHARS = 100

log = logging.getLogger("kvroute.relay")


class MapKeeper:
    """The map of one rank and its file."""

    def __init__(
        self,
        path: Path,
        source: Source,
        rank: Rank,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        """counts: where failures are counted, as `map_unusable` and `map_not_saved`."""
        self.path = path
        self._source = source
        self._rank = rank
        self._clock = clock
        self._counts = counts
        self._saved = rank.position
        self._finishing = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def resume(self) -> None:
        """Gives the rank what an earlier life kept; call before the rank is started."""
        try:
            kept = await asyncio.to_thread(self._load)
        except Exception as error:  # whatever is in the file: the engine is followed without it
            self._counts["map_unusable"] += 1
            log.error("%s: %s is of no use: %s", self._source.worker, self.path, error)
            return
        if kept is not None:
            self._rank.resume(*kept)
            log.info(
                "%s: the map in %s has %d placements, as after engine message %d; it counts once"
                " the engine shows that it still is in that life",
                self._source.worker,
                self.path,
                kept[1].count(),
                kept[0].seq,
            )

    def start(self, supervisor: Supervisor) -> None:
        """Writes the map now and then, until `finish`."""
        self._keeping = supervisor.keep(self._keep, "map")

    async def finish(self) -> None:
        """Writes it for the last time; call when the rank changes no more."""
        self._finishing.set()
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        took_s = 0.0
        finishing = False
        while not finishing:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s(took_s)):
                    finishing = await self._finishing.wait()
            started_s = loop.time()
            await self._save()
            took_s = loop.time() - started_s

    async def _save(self) -> None:
        position = self._rank.position
        if position == self._saved:
            return
        try:
            kept = self._rank.kept(self._clock())
            if kept is not None:
                await asyncio.to_thread(self._write, *kept)
                self._saved = position
        except Exception as error:  # of the disk or of the map: the next time may go well
            self._counts["map_not_saved"] += 1
            log.error("%s: can't write %s: %r", self._source.worker, self.path, error)

    def _load(self) -> tuple[Checkpoint, Ledger] | None:
        data = read_file(self.path)
        return None if data is None else unpack(self._source, data)

    def _write(self, checkpoint: Checkpoint, copy: LedgerCopy) -> None:
        write_file(self.path, pack(self._source, checkpoint, copy))


def pause_s(took_s: float) -> float:
    """Until a map is written again, when it took so long."""
    return max(KEEP_S, took_s / SAVE_SHARE)


def map_path(state_dir: Path, fleet: str, worker: WorkerKey) -> Path:
    """Where a rank's map is kept. A digest tells apart what is too long for a name."""
    whole = f"{fleet}.{escape(worker.worker_id)}.{worker.dp_rank}"
    return state_dir / f"{whole[:_READABLE_CHARS]}-{xxh3_64_hexdigest(whole.encode())}.map"


def write_file(path: Path, data: bytes) -> None:
    """Puts data in the place of what was there. Raises OSError, and then the old file stays."""
    _check_size(len(data))
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a loss of power may bring the old name back
    finally:
        os.close(folder)


def read_file(path: Path) -> bytes | None:
    """What is there; None when nothing is. Raises OSError."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    _check_size(size)
    return path.read_bytes()


def _check_size(size: int) -> None:
    if size > FILE_BYTES_MAX:
        raise OSError(f"{size} bytes, more than {FILE_BYTES_MAX}")
