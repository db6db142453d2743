"""Makes inputs, gives them to the readers, and keeps those whose outcome is new."""

import base64
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from events.plane import facts
from kvroute.v1 import fleet_pb2, router_pb2
from tests.fuzz import packed, picker
from tests.fuzz.inputs import Messages, Packed, mutated
from tests.fuzz.wire import WireReaders

TESTS = Path(__file__).parents[1]
CORPUS = Path(__file__).with_name("corpus")
POOL_MAX = 400
"""Inputs of a reader that mutations begin with."""
CORPUS_MAX = 60
"""Inputs of a reader that are kept in the corpus, of KEPT_BYTES_MAX at most."""
KEPT_BYTES_MAX = 1024
FAILURES_MAX = 20
_PROTOBUF = {
    "route": router_pb2.RouteRequest.DESCRIPTOR,
    "batch": router_pb2.RouteBatch.DESCRIPTOR,
    "report": router_pb2.ReportRequest.DESCRIPTOR,
    "command": fleet_pb2.RegisterWorkerRequest.DESCRIPTOR,
}

_PICKER = {"http2": picker.make_http2, "ext_proc": picker.make_ext_proc}


@dataclass(frozen=True)
class Failure:
    """An input on which two readers differ, or one raised."""

    reader: str
    content: bytes
    error: str


@dataclass
class _Pool:
    """Inputs of one reader."""

    inputs: list[bytes] = field(default_factory=list)
    outcomes: dict[Any, bytes] = field(default_factory=dict)


class Fuzzer:
    """All readers; the same seed gives the same inputs."""

    def __init__(self, seed: int, only: Collection[str] = ()) -> None:
        """only: names of readers; empty: all."""
        self.rng = random.Random(seed)
        self._picker_rng = random.Random(f"picker {seed}")
        """So that other readers' inputs stay those of the seed."""
        self.failures: list[Failure] = []
        self.runs: Counter[str] = Counter()
        wire = WireReaders()
        self.readers: dict[str, Callable[[bytes], Any]] = {
            name: getattr(wire, name) for name in _PROTOBUF
        }
        for reader in (packed.engine, packed.plane, picker.http2, picker.ext_proc):
            self.readers[reader.__name__] = reader
        if unknown := set(only) - set(self.readers):
            raise ValueError(f"no reader is named {', '.join(sorted(unknown))}")
        if only:
            self.readers = {name: self.readers[name] for name in only}
        self._messages = Messages(self.rng)
        self._packed = Packed(self.rng)
        self._pools = {name: _Pool() for name in self.readers}

    @override
    def __repr__(self) -> str:
        runs = ", ".join(f"{name} {count:,}" for name, count in self.runs.items())
        outcomes = sum(len(pool.outcomes) for pool in self._pools.values())
        total = self.runs.total()
        return f"{total:,} inputs ({runs}), {outcomes} outcomes, {len(self.failures)} failures"

    def corpus(self) -> Iterator[tuple[str, bytes]]:
        """The kept inputs, and what engines sent."""
        for path in sorted(CORPUS.glob("*.txt")):
            for line in path.read_text(encoding="ascii").splitlines():
                yield path.stem, base64.b64decode(line)
        for path in sorted((TESTS / "golden").glob("**/frames.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines()[:40]:
                yield "engine", base64.b64decode(json.loads(line)["payload_b64"])

    def keep(self) -> None:
        """Writes the corpus: an input for each outcome, the short ones first."""
        for name, pool in self._pools.items():
            kept = sorted(pool.outcomes.values(), key=lambda one: (len(one), one))
            lines = [base64.b64encode(one).decode() for one in kept if len(one) <= KEPT_BYTES_MAX]
            text = "".join(f"{line}\n" for line in lines[:CORPUS_MAX])
            (CORPUS / f"{name}.txt").write_text(text, encoding="ascii")

    def rounds(self, count: int) -> None:
        """One input for each reader, so many times."""
        for _ in range(count):
            for name in self.readers:
                self.run(name, self.make(name))

    def make(self, name: str) -> bytes:
        """A new input, or a mutation of an earlier one."""
        rng, pool = self._rng_of(name), self._pools[name].inputs
        if pool and rng.random() < 0.5:
            return mutated(rng.choice(pool), pool, rng)
        if name in _PROTOBUF:
            return self._messages.make(_PROTOBUF[name])
        if name in _PICKER:
            return _PICKER[name](rng)
        if pool and rng.random() < 0.8:
            known, value = packed.by_msgspec(rng.choice(pool))
            if known:
                try:
                    return msgspec.msgpack.encode(self._packed.changed(value))
                except (TypeError, ValueError, OverflowError):
                    pass  # a value that msgspec reads and does not write
        if name == "plane":
            return facts.encode(rng.choice(PLANE))
        return msgspec.msgpack.encode([1.5, [self._event() for _ in range(rng.randrange(6))], 0])

    def run(self, name: str, content: bytes) -> None:
        """Gives an input to a reader; whatever it raises is a failure."""
        self.runs[name] += 1
        try:
            outcome = self.readers[name](content)
        except Exception as error:
            failure = Failure(name, content, f"{type(error).__name__}: {error}")
            known = {(one.reader, one.error[:60]) for one in self.failures}
            if len(known) < FAILURES_MAX and (name, failure.error[:60]) not in known:
                self.failures.append(failure)
            return
        pool = self._pools[name]
        if outcome not in pool.outcomes:
            pool.outcomes[outcome] = content
        elif self._rng_of(name).random() > 0.02:
            return
        if len(pool.inputs) < POOL_MAX:
            pool.inputs.append(content)
        else:
            pool.inputs[self._rng_of(name).randrange(POOL_MAX)] = content

    def _rng_of(self, name: str) -> random.Random:
        return self._picker_rng if name in _PICKER else self.rng

    def shortened(self, failure: Failure) -> Failure:
        """The failure with bytes left out that it doesn't need."""
        content, before = failure.content, -1
        while len(content) != before:
            before = len(content)
            for step in (64, 16, 4, 2, 1):
                at = 0
                while at < len(content):
                    shorter = content[:at] + content[at + step :]
                    if self._error(failure.reader, shorter)[:40] == failure.error[:40]:
                        content = shorter
                    else:
                        at += step
        return Failure(failure.reader, content, self._error(failure.reader, content))

    def _error(self, name: str, content: bytes) -> str:
        try:
            self.readers[name](content)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _event(self) -> Any:
        rng = self.rng
        blocks = rng.randrange(6)
        hashes = [rng.randrange(-9, 9) for _ in range(blocks)]
        removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": rng.choice((None, rng.randrange(-9, 9))),
            "token_ids": [rng.randrange(1000) for _ in range(4 * blocks)],
            "block_size": rng.choice((4, 4, 4, 0, 1)),
        }
        event = rng.choice((removed, stored, stored, {"type": "AllBlocksCleared"}))
        if rng.random() < 0.3:
            event = self._packed.changed(event)
        return list(event.values()) if isinstance(event, dict) and rng.random() < 0.5 else event


_EPOCH = facts.Epoch(1, 2)
_HASHES = facts.pack_hashes([1, 2, 1 << 63])
_FACTS: list[facts.Fact] = [
    facts.Stored(_HASHES, "device", 7),
    facts.Removed(_HASHES[:8], "host"),
    facts.Cleared(),
]
PLANE = (
    facts.FactsMessage(1, _EPOCH, 3, _FACTS, 1.5),
    facts.Beat(1, _EPOCH, 3, 4, 5, True, 1.5, ("a",)),
    facts.Heartbeat(epoch=_EPOCH, address="http://a", engine="vllm", sent_at_s=1.0),
    facts.SnapshotRequest(1, 2, _EPOCH, 3),
    facts.SnapshotChunk(1, _EPOCH, 3, 0, 1, [facts.Stored(_HASHES, "device")], [b"abc"]),
    facts.Hello(1, "a"),
    facts.Control(1, "a", "drain", "b", 1.0, 2.0),
    facts.Warm(id="a", tokens=bytes(8)),
    facts.Warmed(id="a", done=True),
)
"""A message of each kind."""
