"""Pools: the kept columns say what view and loads say, whatever happened before."""

import random

import numpy as np
import pytest

from events.engines.numbers import GAUGES
from events.feed.fleet_view import Source
from events.feed.stream import StreamState
from events.plane.facts import Stored, pack_hashes
from indexer.identity import WorkerKey
from router.decide.core.progress import ProgressState
from router.fleet.pools import RECOVERING_TRUST, heartbeat_of
from router.fleet.table import COLUMNS
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import shares

TRUST = {StreamState.LIVE: 1.0, StreamState.RECOVERING: RECOVERING_TRUST}


class Changing:
    """A fleet to which anything happens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fleet = Fleet()
        self.open: list[str] = []
        self.added = 0

    def step(self) -> None:
        rng, fleet = self.rng, self.fleet
        keys = list(fleet.view.sources)
        what = rng.random()
        if what < 0.1 or not keys:
            if len(keys) < 12:
                self.added += 1
                fleet.add(f"w{self.added}", total_blocks=rng.choice([None, 5, 1000]))
        elif what < 0.15:
            fleet.core.remove(rng.choice(keys).worker_id, 0.001, fleet.now_s)
        elif what < 0.35:
            self.heartbeat(rng.choice(keys))
        elif what < 0.5:
            self.recover(rng.choice(keys))
        elif what < 0.55:
            fleet.turn(rng.choice([0.5, 1.0, 4.0]), silent=rng.sample(keys, len(keys) // 3))
        elif what < 0.85:
            try:
                self.open.append(fleet.route(prompt(rng.choice([8, 40, 200]))).reservation.id)
            except Refusal:
                assert not any(
                    fleet.core.fleet.excluded(one) == "" for one in self.sources()
                ) or any(self.expected(one)["full"] for one in self.sources())
        elif self.open:
            state = rng.choice([ProgressState.PREFILL_DONE, ProgressState.FINISHED])
            fleet.report(rng.choice(self.open), state)

    def heartbeat(self, key: WorkerKey) -> None:
        changes = {"running": self.rng.randrange(5), "waiting": self.rng.randrange(3)}
        if self.rng.random() < 0.3:
            changes["total_slots"] = self.rng.choice([2, 50])
        self.fleet.say(key, used_blocks=float(self.rng.randrange(9)), **changes)

    def recover(self, key: WorkerKey) -> None:
        """A gap; and, as a rule, the snapshot that heals it, in a slot of its own."""
        relay = self.fleet.relays[key]
        self.fleet.tell(key, lost=True)
        for pull in self.fleet.tell(key):
            self.fleet.view.on_pull_failed(pull, "ring too short", self.fleet.now_s)
            if self.rng.random() < 0.8:
                facts = [
                    Stored(pack_hashes(np.array(sorted(held), np.uint64)), tier.name.lower())
                    for tier, held in relay.held.items()
                ]
                self.fleet.view.on_snapshot(
                    key, relay.epoch, relay.seq, facts, True, self.fleet.now_s
                )

    def sources(self) -> list[Source]:
        return [one for one in self.fleet.view.sources.values() if one.heartbeat is not None]

    def expected(self, source: Source) -> dict[str, float]:
        heartbeat = heartbeat_of(source)
        load = self.fleet.core.fleet.load_of(source.key)
        total_blocks = heartbeat.total_blocks or np.nan
        total_slots = heartbeat.total_slots or np.nan
        derived = shares(load.active_requests(), load.active_blocks(), total_slots, total_blocks)
        return {
            "block_size": heartbeat.block_size,
            "total_blocks": total_blocks,
            "total_slots": total_slots,
            "trust": TRUST.get(source.stream.state, 0.0),
            "running": load.running,
            "waiting": load.waiting,
            "reserved": load.active_requests() - load.running - load.waiting,
            "active_blocks": load.active_blocks(),
            "prefill_tokens_active": load.prefill_tokens,
            "last_picked": load.last_picked,
            "active_slots": load.active_requests(),
            **{name: heartbeat.numbers.get(name, np.nan) for name in GAUGES},
            "tpot_s": np.nan,
            **dict(zip(("load", "slot_ratio", "full", "load_unknown"), derived, strict=True)),
        }

    def check(self) -> None:
        pools = self.fleet.core.fleet.pools
        pools.refresh()
        sources = self.sources()
        if not sources:
            return
        up, down = pools.live("m", True)
        assert {one.key for one in up.sources} == {
            one.key for one in sources if self.fleet.core.fleet.excluded(one) == ""
        }
        assert len(up) + len(down) == len(sources)
        table = pools.table(up)
        for row, source in enumerate(up.sources):
            found = dict(zip(COLUMNS, table[:, row].tolist(), strict=True))
            np.testing.assert_equal(found, self.expected(source))
        full = any(self.expected(one)["full"] for one in sources)
        assert bool(pools.written.full) == full


@pytest.mark.parametrize("seed", range(40))
def test_the_columns_say_what_view_and_loads_say(seed: int) -> None:
    changing = Changing(random.Random(seed))
    for _ in range(150):
        changing.step()
        changing.check()


def test_a_model_that_nobody_serves_costs_one_look_however_large_the_fleet_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    for i in range(50):
        fleet.add(f"w{i}", lora_names=tuple(f"lora-{i}-{n}" for n in range(20)))
    fleet.route(prompt(100), model="m")
    seen: list[str] = []

    def serves(heartbeat: object, model: str) -> bool:
        seen.append(model)
        return False

    monkeypatch.setattr(fleet.core.fleet.models, "serves", serves)
    for name in ("nobody", "nobody", "lora-51-0"):
        with pytest.raises(Refusal, match="served here: m") as caught:
            fleet.route(prompt(100), model=name)
        assert caught.value.reason is Reason.UNKNOWN_MODEL
    fleet.route(prompt(100), model="m")
    assert seen == [], "no worker is looked at, and the pool of m is kept"


def test_the_names_that_are_served_follow_the_heartbeats() -> None:
    fleet = Fleet()
    key = fleet.add("w0", model="a", lora_names=("ad", "a"), model_aliases=("b",))
    other = fleet.add("w1", model="c")
    core = fleet.core
    core.fleet.pools.refresh()
    with pytest.raises(Refusal, match=r"serves 2 models.*: a, c'"):
        core.fleet.pools.live("", True)
    assert [core.fleet.lora_of(name) for name in ("a", "ad", "b", "c", "x")] == [
        "a",
        "ad",
        "",
        "",
        "",
    ]
    fleet.say(key, model="c", lora_names=(), model_aliases=())
    core.fleet.pools.refresh()
    assert [core.fleet.lora_of(name) for name in ("a", "ad")] == ["", ""]
    pool, _ = core.fleet.pools.live("", True)
    assert pool.workers == (key, other)
    core.fleet.models.seen.clear()
    with pytest.raises(Refusal, match=r"served here: c\W"):
        core.fleet.pools.live("a", True)
