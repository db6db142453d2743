"""The decision log: lines of JSON in files that are rotated by size, written by a thread.

The event loop takes a decision's numbers (router/observe/audit/logged_decision.py), or a refusal's
(router/observe/audit/logged_refusal.py), and puts them in a queue; the thread encodes and writes
them. No request waits for the disk: a line that finds the queue full is dropped and counted, and
another thread opens a file that is configured while requests are served.

Laws:
- lines = written + dropped + failed + those in the queue;
- a line goes to the files that were configured when it was made;
- there are never more files than configured, and none is larger than configured.
"""

import asyncio
import logging
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import IO

from router.config.keys import ConfigError
from router.config.settings.serving_settings import DecisionLogSettings
from router.decide.decision.decision import Decision
from router.observe.audit.logged_decision import LoggedDecision, capture, encode
from router.observe.audit.logged_refusal import LoggedRefusal, capture_refusal
from router.request.refusal import Refused

QUEUE_MAX = 1024
"""Lines that wait to be written; of 64 workers about 20 KB each."""
SWITCHES_MAX = 8
"""Most changes of the log's file that wait in the queue for the lines before them, and most files
that are being opened."""
FILES = 4
"""Files of the log, the current one included: a rotation drops a quarter of the lines kept."""
CLOSE_S = 5.0
"""Most seconds that a stop waits for the disk."""
RESULTS = ("written", "dropped", "failed")

log = logging.getLogger("kvroute.decisions")


@dataclass(frozen=True, slots=True)
class _Switch:
    """Entry of the queue: the lines behind it go to `files`; None: they are not written."""

    files: "RotatedFiles | None"


class DecisionLog:
    """The decision log. `use` sets its file; `watch` is called on the event loop; `close` last."""

    def __init__(self, replica: str) -> None:
        self.lines: Counter[str] = Counter()
        """Lines by what became of them, one of RESULTS."""
        self._settings = DecisionLogSettings()
        self._replica = replica
        self._queue: Queue[LoggedDecision | LoggedRefusal | _Switch | None] = Queue(
            QUEUE_MAX + SWITCHES_MAX
        )
        self._thread = threading.Thread(target=self._write_all, name="decision log", daemon=True)
        self._openings: list[Future[RotatedFiles]] = []
        """Files that are being opened, each by a thread; some may be done."""

    @property
    def is_on(self) -> bool:
        """Whether lines are written."""
        return self._settings.file is not None

    async def use(self, settings: DecisionLogSettings) -> None:
        """Writes to the configured file from now on; queued lines go to the file of their time. The
        file is opened by a thread, so that no other task waits for the disk.

        Raises ConfigError, and changes nothing, when the file can't be written, or when earlier
        changes of the file still wait for the disk, SWITCHES_MAX of them or more.
        """
        if _place(settings) != _place(self._settings):
            files = None if settings.file is None else await self._open(settings)
            try:
                self._queue.put_nowait(_Switch(files))
            except Full:
                raise _hangs() from None
            if not self._thread.is_alive():
                self._thread.start()
        self._settings = settings

    def watch(self, decision: Decision) -> None:
        """Queues the line of a decision, before anything of it is reserved."""
        if self._has_room():
            self._queue.put_nowait(capture(decision, self._replica, self._settings.hashes))

    def watch_refused(self, refused: Refused) -> None:
        """Queues the line of a request that got no worker."""
        if self._has_room():
            self._queue.put_nowait(capture_refusal(refused, self._replica, self._settings.hashes))

    def close(self) -> None:
        """Writes queued lines, for a bounded time. Safe if nothing was ever written."""
        if self._thread.is_alive():
            with suppress(Full):  # a disk that hangs; the thread ends with the process
                self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    async def _open(self, settings: DecisionLogSettings) -> "RotatedFiles":
        self._openings = [each for each in self._openings if not each.done()]
        if len(self._openings) >= SWITCHES_MAX:
            raise _hangs()
        opening: Future[RotatedFiles] = Future()
        opening.set_running_or_notify_cancel()  # from here on a cancelled wait leaves it alone

        def end() -> None:
            try:
                opening.set_result(_opened(settings))
            except Exception as error:
                opening.set_exception(error)

        self._openings.append(opening)
        threading.Thread(target=end, name="file of the decision log", daemon=True).start()
        return await asyncio.wrap_future(opening)

    def _has_room(self) -> bool:
        """Whether the queue has room for a line; this object alone puts lines."""
        if self._queue.qsize() >= QUEUE_MAX:
            self.lines["dropped"] += 1
            return False
        return True

    def _write_all(self) -> None:
        files: RotatedFiles | None = None
        complained = False
        while (line := self._queue.get()) is not None:
            if isinstance(line, _Switch):
                if files is not None:
                    files.close()
                files, complained = line.files, False
            elif files is not None:
                try:
                    files.write(encode(line))
                except OSError as error:
                    self.lines["failed"] += 1
                    if not complained:
                        log.error("writing decision log %s failed: %s", files.file, error)
                    complained = True
                else:
                    self.lines["written"] += 1
        if files is not None:
            files.close()


def _place(settings: DecisionLogSettings) -> tuple[object, ...]:
    """The settings whose change begins another file."""
    return settings.file, settings.max_mib


def _hangs() -> ConfigError:
    return ConfigError(
        "the disk takes no writes, and too many changes of the log wait for it"
        " - at `$.decision_log.file`"
    )


def _opened(settings: DecisionLogSettings) -> "RotatedFiles":
    """Files that can be written; raises ConfigError.

    They are opened again with the first line, since another thread may rotate the same ones until
    then.
    """
    file = Path(settings.file or "")
    files = RotatedFiles(file, (settings.max_mib << 20) // FILES, FILES)
    try:
        files.open()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror} - at `$.decision_log.file`") from error
    finally:
        files.close()
    return files


class RotatedFiles:
    """The log's file, and the full ones before it: FILE, FILE.1 and so on, the newest first."""

    def __init__(self, file: Path, bytes_max: int, files_max: int) -> None:
        self.file = file
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._open: IO[bytes] | None = None
        self._size = 0

    def open(self) -> None:
        """Opens the file, and appends to an existing one. Raises OSError."""
        self._open = self.file.open("ab", buffering=0)
        self._size = self._open.tell()

    def write(self, line: bytes) -> None:
        """Writes a line. Raises OSError, also for a line larger than a file; the next call tries
        again.
        """
        if len(line) > self._bytes_max:
            raise OSError(f"a line has {len(line)} bytes, more than a file may have (max_mib / 4)")
        if self._open is None:
            self.open()
        if self._size + len(line) > self._bytes_max:
            self._rotate()
        if self._open is None:
            raise OSError("the decision log can't be written: its file could not be opened")
        try:
            written = self._open.write(line)
            if written != len(line):
                raise OSError(f"only {written} of a line's {len(line)} bytes were written")
        except OSError:
            with suppress(OSError):  # half a line would spoil the next one
                self._open.truncate(self._size)
            self.close()
            raise
        self._size += len(line)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _rotate(self) -> None:
        self.close()
        names = [self.file, *(Path(f"{self.file}.{i}") for i in range(1, self._files_max))]
        if len(names) == 1:
            self.file.unlink(missing_ok=True)
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                newer.replace(older)
        self.open()
