"""The event plane under faults, in a few hundred seeded runs; the checker, under planted bugs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.engines.events import BlocksRemoved, EngineEvent
from events.feed.fleet_view import FleetView, Pull
from events.feed.stream import Effect, Stream
from events.plane.facts import Beat, Epoch, FactsMessage, Stored
from events.relay.ledger import Change, Ledger
from events.relay.rank import Rank, RankEffect
from indexer.identity import WorkerKey
from tests.simulation.__main__ import main
from tests.simulation.faults import Options
from tests.simulation.world import Broken, Parts, World, command, explain

RUNS = 120
MET_IN = 40
"""Of these: those in which each kind of trouble is met."""
AT_ONCE = 10
TROUBLES = {
    "blackout",
    "broker restart",
    "clock stall",
    "cut",
    "engine restart",
    "lost between engine and relay",
    "lost between relay and router",
    "ledger believed",
    "ledger dropped",
    "ledger torn",
    "relay restart",
    "reset",
    "reset that is never told",
    "resync",
    "router restart",
    "slow consumer",
    "stall",
    "two relays",
}


def run(seed: int) -> Counter[str]:
    """What went wrong in a run, none of which broke a law."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(explain(seed, error, world.log)) from error
    return world.counts


@pytest.mark.parametrize("first", range(MET_IN, RUNS, AT_ONCE))
def test_no_fault_makes_a_live_stream_wrong_and_quiet_makes_every_stream_right(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        run(seed)


def test_the_runs_meet_every_kind_of_trouble_and_end_complete_or_partial() -> None:
    met = sum((run(seed) for seed in range(MET_IN)), Counter[str]())
    assert met.keys() == TROUBLES | {"complete", "partial"}
    assert min(met["complete"], met["partial"]) > 30


@pytest.mark.parametrize("seed", range(8))
def test_where_nothing_goes_wrong_every_stream_is_complete(seed: int) -> None:
    world = World(seed, Options(host_blocks=8 * (seed % 2), native_index=bool(seed % 2)))
    world.run()
    assert world.counts["partial"] == 0
    assert world.counts["complete"] == 4


def test_relays_that_keep_their_maps_stay_complete_though_replays_are_short() -> None:
    ended: dict[float | None, Counter[str]] = {None: Counter(), 0.5: Counter()}
    for seed in range(6):
        for keep_s, counts in ended.items():
            options = Options(
                active_s=30.0, replay_ring_batches=120, relay_restarts_per_s=0.2, keep_s=keep_s
            )
            world = World(seed, options)
            world.run()
            counts.update(world.counts)
    assert ended[None]["partial"] > ended[None]["complete"]
    assert ended[0.5]["partial"] == ended[0.5]["ledger dropped"] == 0
    assert ended[0.5]["ledger believed"] > 20


@pytest.mark.parametrize("seed", [7, 8])
def test_the_same_seed_has_the_same_log(seed: int) -> None:
    worlds = [World(seed), World(seed), World(seed + 100)]
    for world in worlds:
        world.run()
    first, second, other = [world.log for world in worlds]
    assert first == second != other
    assert len(first) > 5


# --- the checker, under planted bugs ---


class HeedlessStream(Stream):
    """Ignores gaps."""

    @override
    def on_facts(self, message: FactsMessage, size: int, now_s: float) -> list[Effect]:
        if message.epoch == self.epoch and message.seq > self.seq:
            self.seq = message.seq - 1
        return super().on_facts(message, size, now_s)


class EasyStream(Stream):
    """Takes a beat for a sign of life and no more."""

    @override
    def on_beat(self, beat: Beat, blocks: int, digest: int, now_s: float) -> list[Effect]:
        if beat.epoch == self.epoch and beat.seq > self.seq:
            ours = Beat(beat.v, beat.epoch, self.seq, blocks, digest, beat.complete, beat.time_s)
            return super().on_beat(ours, blocks, digest, now_s)
        return super().on_beat(beat, blocks, digest, now_s)


class LeakyStream(Stream):
    """Never throws away what waits."""

    @override
    def _keep(self, message: FactsMessage, size: int) -> None:
        self._buffer.append((message, size))


class HoardingLedger(Ledger):
    """Skips every tenth removal."""

    removals = 0

    @override
    def apply(self, *events: EngineEvent) -> list[Change]:
        return super().apply(*(event for event in events if not self._skips(event)))

    def _skips(self, event: EngineEvent) -> bool:
        self.removals += isinstance(event, BlocksRemoved)
        return isinstance(event, BlocksRemoved) and self.removals % 10 == 0


class SleepingRank(Rank):
    """Doesn't notice that its engine is another one."""

    @override
    def _restart(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        return self._apply(seq, payload, now_s)


class BoastingRank(Rank):
    """Claims to know all, whatever it lost."""

    @override
    def _lose(self, now_s: float) -> list[RankEffect]:
        effects = super()._lose(now_s)
        self.complete = True
        return effects


class GullibleRank(Rank):
    """Goes on from a saved ledger, whatever the engine shows."""

    @override
    def on_replay(
        self, messages: Sequence[tuple[int, bytes]], ended: bool, now_s: float
    ) -> list[RankEffect]:
        if self._kept is not None and messages:
            checkpoint, ledger = self._kept
            seq, payload = messages[0]
            shown = xxh3_64_intdigest(payload)
            self._kept = msgspec.structs.replace(checkpoint, seq=seq, digest=shown), ledger
        return super().on_replay(messages, ended, now_s)


class QuietRank(Rank):
    """Doesn't tell that an epoch begins with blocks."""

    @override
    def _start_epoch(self, ledger: Ledger, seq: int, now_s: float) -> list[RankEffect]:
        return super()._start_epoch(ledger, 0, now_s)


class HastyView(FleetView):
    """Takes a snapshot for one message newer than it is."""

    @override
    def on_snapshot(
        self,
        key: WorkerKey,
        epoch: Epoch,
        as_of: int,
        facts: list[Stored],
        complete: bool,
        now_s: float,
    ) -> list[Pull]:
        return super().on_snapshot(key, epoch, as_of + 1, facts, complete, now_s)


class DeafView(FleetView):
    """Gives up a recovery that failed."""

    @override
    def on_pull_failed(self, pull: Pull, reason: str, now_s: float) -> list[Pull]:
        return []


@pytest.mark.parametrize(
    ("parts", "laws"),
    [
        (Parts(stream=HeedlessStream), {"live"}),
        (Parts(stream=EasyStream), {"false live"}),
        (Parts(stream=LeakyStream), {"bounds"}),
        (Parts(ledger=HoardingLedger), {"ledger"}),
        (Parts(rank=SleepingRank), {"ledger"}),
        (Parts(rank=BoastingRank), {"ledger"}),
        (Parts(rank=GullibleRank), {"ledger"}),
        (Parts(rank=QuietRank), {"live"}),
        (Parts(view=HastyView), {"live"}),
        (Parts(view=DeafView), {"quiet"}),
    ],
    ids=lambda value: next(
        (one.__name__ for one in vars_of(value) if one.__module__ == __name__), None
    ),
)
def test_a_planted_bug_is_found(parts: Parts, laws: set[str]) -> None:
    found = set()
    for seed in range(60):
        try:
            World(seed, parts=parts).run()
        except Broken as broken:
            found.add(broken.law)
            if laws <= found:
                return
    pytest.fail(f"found {found or 'nothing'}, where {laws} is broken")


def vars_of(value: object) -> Sequence[type]:
    if isinstance(value, Parts):
        return [value.rank, value.ledger, value.view, value.stream]
    return []


# --- the command ---


def test_a_failure_names_one_command_that_runs_it_again() -> None:
    told = explain(17, Broken("live", "w0/0 differs"), [(1.5, "cut", "router 0")])
    assert "Broken: live: w0/0 differs" in told
    assert "1.5 cut router 0" in told
    assert told.endswith("again: make soak SEED=17 RUNS=1")
    assert command(17) == "make soak SEED=17 RUNS=1"


def test_a_soak_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--runs", "2", "--seconds", "0.0"]) == 0
    line = '{"runs": 1, "diverged": 0, "false_live": 0, "seed": 3}\n'
    assert capsys.readouterr().out == line


def test_a_soak_fails_when_a_law_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(world: World) -> None:
        raise Broken(["false live", "live", "quiet"][world.counts["run"] % 3], "so it is")

    monkeypatch.setattr(World, "run", fails)
    assert main(["--seed", "3", "--runs", "2"]) == 1
    told = capsys.readouterr()
    assert told.out == '{"runs": 2, "diverged": 0, "false_live": 2, "seed": 3}\n'
    assert "make soak SEED=4 RUNS=1" in told.err


def test_options_can_be_made_harder_one_by_one() -> None:
    world = World(1, replace(Options(), loss=0.5, requests_lost=0.5, stream_buffer_messages=3))
    world.run()
    assert world.counts["lost between relay and router"] > 20
