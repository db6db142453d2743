"""Several cores on one fleet, in turned time: load that they tell one another, and that they don't.

The stage: eight workers, requests that take five seconds, replicas that get them at random. Engines
report once a second; replicas exchange every 20 ms, which `ReplicaLink` does sooner.
"""

import random
from collections import Counter
from dataclasses import dataclass
from statistics import median

import pytest

from events.feed.replicas import TTL_S, Teller
from events.plane.facts import Epoch
from indexer.identity import WorkerKey
from router.config.settings.routing_settings import AffinitySettings, RoutingSettings
from router.decide.core.progress import Progress, ProgressState
from router.fleet.reservations.reservations import Ending
from tests.stage.fleet import START_S, Fleet, prompt

WORKERS = [WorkerKey(f"w{i}", 0) for i in range(8)]
TURN_S = 0.02


@dataclass
class Served:
    """A request on its worker."""

    replica: Fleet
    reservation_id: str
    worker: WorkerKey
    began_s: float
    ends_s: float


class Replicas:
    """N cores that see the same workers."""

    def __init__(
        self, count: int, *, tell: bool, seed: int, policy: str, service_s: float = 5.0
    ) -> None:
        self.fleets = [Fleet(seed=seed + i, replica=f"r{i}", policy=policy) for i in range(count)]
        for fleet in self.fleets:
            for key in WORKERS:
                fleet.add(key.worker_id, total_slots=1000)
        self.tellers = [Teller(f"r{i}", Epoch(1, i)) for i in range(count)] if tell else []
        self.rng = random.Random(seed)
        self.now_s = START_S
        self.served: list[Served] = []
        self._sent = 0
        self._sampled_s = START_S
        self._service_s = service_s

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            fleet = self.rng.choice(self.fleets)
            self._sent += 1
            pick = fleet.route(prompt(256, first=1000 * self._sent), request_id=f"q{self._sent}")
            found = pick.reservation
            ends_s = self.now_s + self._service_s * self.rng.uniform(0.9, 1.1)
            self.served.append(Served(fleet, found.id, found.worker, self.now_s, ends_s))

    def turn(self) -> None:
        """20 ms go by."""
        self.now_s += TURN_S
        for fleet in self.fleets:
            fleet.now_s = self.now_s
        for one in [one for one in self.served if one.ends_s <= self.now_s]:
            self.served.remove(one)
            done = Progress(one.reservation_id, ProgressState.FINISHED)
            one.replica.core.report(done, self.now_s)
        if self.now_s - self._sampled_s >= 1.0:
            self._sampled_s = self.now_s
            running, used = self.in_flight(), self.used_blocks()
            for fleet in self.fleets:
                for key in WORKERS:
                    fleet.beat(key)
                    fleet.say(key, running=running[key], used_blocks=float(used[key]))
        self.exchange()

    def exchange(self) -> None:
        for teller, fleet in zip(self.tellers, self.fleets, strict=False):
            verdicts = fleet.core.fleet.outliers.verdicts(self.now_s)
            moved = fleet.core.fleet.sessions.take_moved()
            message = teller.message(fleet.core.fleet.loads, self.now_s, verdicts, moved)
            for other in self.fleets:
                if message is not None:
                    other.core.on_inflight(message, self.now_s)
                other.core.tick(self.now_s)

    def in_flight(self) -> Counter[WorkerKey]:
        return Counter(one.worker for one in self.served)

    def used_blocks(self) -> Counter[WorkerKey]:
        """16 of each prompt, and up to 4 that were filled since."""
        used: Counter[WorkerKey] = Counter()
        for one in self.served:
            used[one.worker] += 16 + round(4 * (self.now_s - one.began_s) / self._service_s)
        return used


def imbalance(count: int, *, tell: bool, policy: str) -> float:
    """max / mean of requests in flight, in the mean over the run's second half."""
    replicas = Replicas(count, tell=tell, seed=3, policy=policy)
    found = []
    for i in range(600):  # twelve seconds
        replicas.send(replicas.rng.choice([0, 1, 1, 2]))
        replicas.turn()
        if i >= 300:
            load = replicas.in_flight()
            found.append(max(load.values()) / (load.total() / len(WORKERS)))
    return sum(found) / len(found)


def test_a_session_goes_on_at_its_worker_whichever_replica_gets_its_next_request() -> None:
    replicas = Replicas(2, tell=True, seed=3, policy="least-loaded")
    here, there = replicas.fleets
    for fleet in replicas.fleets:
        fleet.core.reconfigure(
            RoutingSettings(policy="least-loaded", affinity=AffinitySettings(hard=True))
        )
    replicas.turn()  # they meet
    homes = {f"s{i}": here.picked(prompt(20, first=100 * i), session_id=f"s{i}") for i in range(16)}
    assert len(set(homes.values())) > 1
    replicas.turn()
    for session_id, home in homes.items():
        assert there.picked(prompt(40), session_id=session_id) == home
    # It moves there, and back here the move is known.
    there.core.drain(homes["s0"])
    moved = there.picked(prompt(40), session_id="s0")
    assert moved != homes["s0"]
    replicas.turn()
    assert here.picked(prompt(40), session_id="s0") == moved


def test_what_one_replica_ejects_the_others_keep_away_from_too() -> None:
    replicas = Replicas(2, tell=True, seed=3, policy="least-loaded")
    here, there = replicas.fleets
    replicas.turn()  # they meet
    dead = WORKERS[0]
    for i in range(len(WORKERS)):
        found = here.route(prompt(20, first=100 * i)).reservation
        if found.worker == dead:
            failed = Progress(found.id, ProgressState.FAILED, failure=Ending.FAILED_REFUSED)
            here.core.report(failed, here.now_s)
    assert here.core.fleet.outliers.reason(dead) == "ejected: connections refused"
    replicas.turn()
    assert there.core.fleet.outliers.reason(dead) == "ejected: by another replica"
    standing = there.core.fleet.outliers.standing(dead)
    assert standing is not None
    assert standing.replica == "r0"
    assert dead not in {there.route(prompt(20, first=100 * i)).reservation.worker for i in range(9)}


@pytest.mark.parametrize("policy", ["dynamo-adaptive", "least-loaded"])
def test_replicas_that_tell_one_another_spread_load_as_one_router_does(policy: str) -> None:
    alone = imbalance(1, tell=False, policy=policy)
    for count in (2, 4):
        together = imbalance(count, tell=True, policy=policy)
        assert together < 1.1 * alone, f"{count} replicas: {together:.3f}, one: {alone:.3f}"
    apart = imbalance(4, tell=False, policy=policy)
    assert apart > together, f"apart: {apart:.3f}, together: {together:.3f}"


def bursts(count: int, seed: int) -> float:
    """max / mean of short requests in flight, of which up to four come at the same moment.

    They fill blocks as they go, which samples tell to all replicas alike.
    """
    tell = count > 1
    replicas = Replicas(count, tell=tell, seed=seed, policy="least-loaded", service_s=0.5)
    found = []
    for i in range(300):  # six seconds
        replicas.send(replicas.rng.choice([1, 2, 4]))
        replicas.turn()
        if i >= 75:
            load = replicas.in_flight()
            found.append(max(load.values()) / (load.total() / len(WORKERS)))
    return sum(found) / len(found)


def test_bursts_that_no_replica_can_have_heard_of_are_spread_as_one_router_does() -> None:
    seeds = range(4)
    alone = median(bursts(1, seed) for seed in seeds)
    together = median(bursts(4, seed) for seed in seeds)
    assert together < 1.1 * alone, f"four replicas: {together:.3f}, one: {alone:.3f}"


def test_replicas_that_see_the_same_do_not_all_pick_the_same() -> None:
    """One worker is a little better than the others: for all that don't guess the only choice."""
    replicas = Replicas(4, tell=True, seed=1, policy="least-loaded")
    most: Counter[int] = Counter()
    for _ in range(50):
        for fleet in replicas.fleets:
            for i, key in enumerate(WORKERS):
                fleet.say(key, running=3, used_blocks=100.0 + i)
        replicas.exchange()
        picks = Counter(
            fleet.core.decide(fleet.request(prompt(32)), replicas.now_s).order[0]
            for fleet in replicas.fleets
        )
        most[max(picks.values())] += 1
        replicas.turn()
    assert most[4] < 5, most
    assert most[1] + most[2] > 40, most


def test_what_is_guessed_makes_no_worker_full() -> None:
    replicas = Replicas(2, tell=True, seed=1, policy="least-loaded")
    replicas.exchange()
    here, _ = replicas.fleets
    for _ in range(50):
        for key in WORKERS:
            here.say(key, running=999, used_blocks=999.0)
        assert not any(here.core.decide(here.request(prompt(8)), here.now_s).excluded)
    here.say(WORKERS[0], running=1000)
    assert here.core.decide(here.request(prompt(8)), here.now_s).excluded[0] == "full"


def test_nothing_is_guessed_where_no_replica_is_heard() -> None:
    replicas = Replicas(2, tell=True, seed=1, policy="least-loaded")

    here, _ = replicas.fleets

    def guesses() -> list[float]:
        return [here.core.fleet.load_of(key).unheard for key in WORKERS]

    assert not any(guesses())
    replicas.exchange()
    for _ in range(60):
        replicas.turn()
    assert all(0 < guess < 1 for guess in guesses())
    replicas.fleets, replicas.tellers = [here], replicas.tellers[:1]
    for _ in range(round((TTL_S + 1.1) / TURN_S)):
        replicas.turn()
    assert not any(guesses())


def test_load_is_counted_once_whoever_sent_it() -> None:
    """At every moment each replica's view of a worker is what is in flight there."""
    replicas = Replicas(3, tell=True, seed=5, policy="round-robin")
    for i in range(400):
        replicas.send(replicas.rng.choice([0, 0, 1, 2]))
        replicas.exchange()
        truth = replicas.in_flight()
        for fleet in replicas.fleets:
            for key in WORKERS:
                load = fleet.core.fleet.load_of(key)
                assert load.active_requests() == truth[key], f"turn {i}, {key}"
        replicas.turn()


def test_a_replica_that_dies_gives_its_load_back_when_it_has_not_been_heard_for_the_ttl() -> None:
    replicas = Replicas(2, tell=True, seed=1, policy="round-robin")
    replicas.send(40)
    replicas.turn()
    here, there = replicas.fleets
    sent_there = sum(load.requests for load in there.core.fleet.loads.values())
    assert sum(here.core.fleet.load_of(key).replicas.requests for key in WORKERS) == sent_there
    # What it had sent vanishes with it; the engines' next samples show what is left.
    replicas.served = [one for one in replicas.served if one.replica is here]
    replicas.fleets, replicas.tellers = [here], replicas.tellers[:1]
    for _ in range(round((TTL_S + 1.5) / TURN_S)):
        replicas.turn()
    truth = replicas.in_flight()
    for key in WORKERS:
        load = here.core.fleet.load_of(key)
        assert load.replicas.requests == 0
        assert load.active_requests() == truth[key]


def test_a_worker_that_comes_back_is_seen_with_what_replicas_have_there() -> None:
    replicas = Replicas(2, tell=True, seed=1, policy="round-robin")
    replicas.send(16)
    replicas.turn()
    here, there = replicas.fleets
    key = WORKERS[0]
    sent_there = there.core.fleet.load_of(key).requests
    assert sent_there
    here.core.remove(key.worker_id, 0.001, here.now_s)
    here.now_s += 1.0
    here.core.tick(here.now_s)
    here.add(key.worker_id, total_slots=1000)
    assert here.core.fleet.load_of(key).replicas.requests == sent_there
