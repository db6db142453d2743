"""Finished runs in build/results, so that an interrupted `make results` goes on where it stopped.

A run is kept under a digest of all that decides it: the code of the packages, the trace, and how
it is played on which fleet. A change of any of them is another run; `--again` forgets them all.
Runs of the CODES_MAX latest versions of the code are kept.
"""

import os
import pickle
import zlib
from dataclasses import fields, replace
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from xxhash import xxh3_128

from simulator.study.comparison import Reuse, Traffic
from simulator.traffic.results import RunResult
from simulator.traffic.trace import Trace, TraceRequest
from simulator.world.options import RunOptions
from tests.stage.code_digest import ROOT, code_digest

FOLDER = ROOT / "build" / "results"
CODES_MAX = 3
_FIELDS = tuple(field.name for field in fields(TraceRequest) if field.name != "hash_ids")


class Finished(NamedTuple):
    """What is kept of a run."""

    result: RunResult
    reuse: Reuse


class Kept:
    """The runs of this version of the code."""

    def __init__(self, folder: Path = FOLDER, code: str | None = None) -> None:
        """code: of the version; None: the digest of the packages as they are now."""
        self._folder = folder / (code or code_digest())
        self._traces: dict[int, tuple[Trace, str]] = {}
        """Digests by identity, with the trace, so that no other one gets its identity."""
        self._folder.mkdir(parents=True, exist_ok=True)
        os.utime(self._folder)
        latest_first = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in latest_first[CODES_MAX:]:
            rmtree(old)

    def name(self, traffic: Traffic, rate: float, options: RunOptions) -> str:
        """Of a run: the same for runs that must come out the same."""
        played = replace(traffic, trace=Trace("", ()))
        decides = f"{self._digest(traffic.trace)} {played!r} {rate!r} {options!r}"
        return xxh3_128(decides.encode()).hexdigest()

    def read(self, name: str) -> Finished | None:
        """A finished run, if it is kept."""
        try:
            content = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return Finished(*pickle.loads(zlib.decompress(content)))

    def write(self, name: str, outcome: Finished) -> None:
        """Keeps a run: whole, or, where the program ends meanwhile, not at all."""
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_bytes(zlib.compress(pickle.dumps(tuple(outcome)), 1))
        unfinished.replace(self._folder / name)

    def forget(self) -> None:
        """Removes the runs of this version."""
        for file in self._folder.iterdir():
            file.unlink()

    def _digest(self, trace: Trace) -> str:
        known = self._traces.get(id(trace))
        if known is None:
            known = self._traces[id(trace)] = (trace, _trace_digest(trace))
        return known[1]


def _trace_digest(trace: Trace) -> str:
    digest = xxh3_128(f"{trace.name} {trace.tick_s!r}".encode())
    for request in trace.requests:
        digest.update(repr([getattr(request, name) for name in _FIELDS]).encode())
        digest.update(request.hash_ids.tobytes())
    return digest.hexdigest()
