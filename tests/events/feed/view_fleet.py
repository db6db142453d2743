"""A fleet view with relays that hold a block each, for tests."""

from events.feed.fleet_view import FleetView, Pull, schedulable
from events.feed.stream import StreamState
from events.plane.facts import (
    VERSION,
    Beat,
    Epoch,
    FactsMessage,
    Heartbeat,
    Stored,
    encode,
    pack_hashes,
)
from indexer.identity import WorkerKey
from indexer.index import mix_digest
from indexer.reference import ReferenceIndex

OLD, NOW, NEXT = Epoch(1, 5), Epoch(2, 0), Epoch(3, 0)
TIMEOUT_S, FORGET_S, WORKERS_MAX = 3.0, 30.0, 12


class Fleet:
    """A view, and relays that hold the block of their own number."""

    def __init__(self, workers: int = 0) -> None:
        self.index = ReferenceIndex()
        self.view = FleetView(
            self.index, beat_timeout_s=TIMEOUT_S, forget_s=FORGET_S, workers_max=WORKERS_MAX
        )
        for number in range(workers):
            self.store(number, 0.0)
            self.beat(number, 0.0)
            self.heartbeat(number, 0.0)

    def store(self, number: int, now_s: float, *hashes: int, seq: int = 1) -> list[Pull]:
        fact = Stored(pack_hashes(hashes or (number,)), "device")
        return self.tell(number, FactsMessage(VERSION, NOW, seq, [fact], now_s), now_s)

    def beat(self, number: int, now_s: float, seq: int = 1) -> list[Pull]:
        digest = mix_digest(number, 0, 0) if seq else 0
        return self.tell(number, Beat(VERSION, NOW, seq, seq, digest, True, now_s), now_s)

    def tell(self, number: int, message: FactsMessage | Beat, now_s: float) -> list[Pull]:
        return self.view.on_stream(key(number), encode(message), now_s)

    def heartbeat(
        self,
        number: int,
        now_s: float,
        epoch: Epoch = NOW,
        healthy: bool = True,
        probed: bool = True,
        model: str = "",
        asleep: bool = False,
    ) -> bool:
        message = Heartbeat(
            epoch=epoch,
            address=str(epoch),
            engine="vllm",
            model=model,
            healthy=healthy,
            probed=probed,
            asleep=asleep,
            sent_at_s=now_s,
        )
        return self.view.on_heartbeat(key(number), encode(message), now_s) is not None

    def state(self, number: int) -> StreamState:
        return self.view.sources[key(number)].stream.state

    def reasons(self) -> dict[str, str]:
        return {str(worker): schedulable(source) for worker, source in self.view.sources.items()}


def key(number: int) -> WorkerKey:
    return WorkerKey(f"w{number}", 0)
