"""Saves a rank's ledger (events/relay/saved_ledger.py) on disk for the relay's next start.

One file for each rank, written to a second file that then takes its name, so that it is whole or
absent. Reading, writing and encoding run in threads; a failure is counted, and never ends a relay.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from events.plane.subjects import escape
from events.plane.supervisor import Supervisor
from events.relay.ledger import Ledger, LedgerCopy
from events.relay.rank import Rank
from events.relay.saved_ledger import Checkpoint, Source, pack, unpack
from indexer.identity import WorkerKey

KEEP_S = 30.0
"""Least seconds between two writes; the engine's replay has to reach back that far."""
SAVE_SHARE = 0.02
"""Largest share of the time spent on writes."""
FILE_BYTES_MAX = 1 << 30
"""Bytes of a file; four million blocks, a ledger's bound, take a quarter."""
_READABLE_CHARS = 100

log = logging.getLogger("kvroute.relay")


class LedgerSaver:
    """The saved ledger of one rank, and its file."""

    def __init__(
        self,
        path: Path,
        source: Source,
        rank: Rank,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        """counts: where failures are counted, as `ledger_unusable` and `ledger_not_saved`."""
        self.path = path
        self._source = source
        self._rank = rank
        self._clock = clock
        self._counts = counts
        self._saved = rank.position
        self._finishing = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def resume(self) -> None:
        """Gives the rank its saved ledger, if there is one; call before the rank is started."""
        try:
            kept = await asyncio.to_thread(self._load)
        except Exception as error:  # whatever its content, the engine is followed without it
            self._counts["ledger_unusable"] += 1
            log.error(
                "%s: starts without its saved ledger, since %s can't be used: %s",
                self._source.worker,
                self.path,
                error,
            )
            return
        if kept is not None:
            self._rank.resume(*kept)
            log.info(
                "%s: the ledger in %s has %d placements after engine message %d; it counts once the"
                " engine's messages show that the engine has not restarted since",
                self._source.worker,
                self.path,
                kept[1].count(),
                kept[0].seq,
            )

    def start(self, supervisor: Supervisor) -> None:
        """Starts a background task that writes the blocks of the rank to its file, at intervals of
        pause_s, until `finish`; returns at once.
        """
        self._keeping = supervisor.keep(self._keep, "saved_ledger")

    async def finish(self) -> None:
        """Writes the file for the last time; call after the rank's last change."""
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
                await run_to_end(partial(self._write, *kept))
                self._saved = position
        except Exception as error:  # of the disk or the ledger: the next attempt may succeed
            self._counts["ledger_not_saved"] += 1
            log.error("%s: can't write the ledger %s: %r", self._source.worker, self.path, error)

    def _load(self) -> tuple[Checkpoint, Ledger] | None:
        data = read_file(self.path)
        return None if data is None else unpack(self._source, data)

    def _write(self, checkpoint: Checkpoint, copy: LedgerCopy) -> None:
        write_file(self.path, pack(self._source, checkpoint, copy))


def pause_s(took_s: float) -> float:
    """Seconds to the next write after a write of took_s."""
    return max(KEEP_S, took_s / SAVE_SHARE)


def saved_ledger_path(state_dir: Path, fleet: str, worker: WorkerKey) -> Path:
    """The file of a rank's ledger. The digest in its name keeps apart names that are cut short."""
    whole = f"{fleet}.{escape(worker.worker_id)}.{worker.dp_rank}"
    return state_dir / f"{whole[:_READABLE_CHARS]}-{xxh3_64_hexdigest(whole.encode())}.ledger"


async def run_to_end(work: Callable[[], None]) -> None:
    """Runs work in a thread, and returns or raises when the thread has ended, cancelled or not.

    A caller that left a thread behind would let the next one write the same file beside it.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        _ = running.exception()  # of a write that nobody waits for any more
        try:
            raise cancelled
        finally:
            del cancelled  # a cycle: its traceback refers to this frame
    running.result()


def write_file(path: Path, data: bytes) -> None:
    """Replaces the file's content. Raises OSError, and then the old file stays.

    One writer at a time: the new content goes to a second file of always the same name, so that
    processes that end in the middle of a write leave only one such file behind.
    """
    _check_size(len(data))
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else a power failure may undo the renaming
    finally:
        os.close(folder)


def read_file(path: Path) -> bytes | None:
    """The file's content; None when there is no file. Raises OSError."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    _check_size(size)
    return path.read_bytes()


def _check_size(size: int) -> None:
    if size > FILE_BYTES_MAX:
        raise OSError(f"the saved ledger has {size} bytes, more than {FILE_BYTES_MAX}")
