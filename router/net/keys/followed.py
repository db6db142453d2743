"""Files that are read again while a process runs: certificates and keys.

Law: files that can't be used are logged once and counted, and what was read before stays in force.
"""

import asyncio
import logging
from collections import Counter
from typing import Protocol

FOLLOW_S = 5.0
"""Seconds between two reads of the files: kubelet takes up to a minute to write a changed Secret to
a pod's files."""

log = logging.getLogger("kvroute.keys")


class Readable(Protocol):
    """Interface: something read from files."""

    def reload(self) -> bool:
        """Reads the files again; returns whether they changed. Raises OSError or ValueError, and
        changes nothing, for files that can't be used."""


class Followed:
    """The files that one process reads again when they change."""

    def __init__(self) -> None:
        self._files: dict[str, Readable] = {}
        self._problems: dict[str, str] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """(name, `ok`) -> reads that changed something; (name, `failed`) -> reads that failed, for
        another reason than the read before."""

    def add(self, name: str, files: Readable) -> None:
        """Has files read again. name: for logs and metrics, such as `certificates`."""
        self._files[name] = files
        self.counts[name, "ok"] = self.counts[name, "failed"] = 0

    def look(self) -> None:
        """Reads all files again."""
        for name, files in self._files.items():
            try:
                changed = files.reload()
            except (OSError, ValueError) as error:
                sentence = reason_of(error)
                if self._problems.get(name) != sentence:
                    self._problems[name] = sentence
                    self.counts[name, "failed"] += 1
                    log.error("%s not read again, the old ones stay in force: %s", name, sentence)
                continue
            self._problems.pop(name, None)
            if changed:
                self.counts[name, "ok"] += 1
                log.info("%s read again", name)

    async def run(self) -> None:
        """Reads the files again at an interval, until it is cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            self.look()


def reason_of(error: Exception) -> str:
    """Why a file can't be used, in one sentence."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
