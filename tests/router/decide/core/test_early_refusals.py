"""Requests refused for their expected wait: only while no worker could serve them."""

from random import Random

import pytest
from prometheus_client import CollectorRegistry

from router.api.desk.answers import Waiting
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.config.settings.queue_settings import QueueSettings
from router.decide.core.admission import LOOKS_MAX
from router.decide.queue.admission_queue import LOOK_EACH_S
from router.decide.waiter import Fate
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Reason, Refusal
from router.request.request import Request
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked, desk_of, raised

EARLY = QueueSettings(early_refusal="timeout", timeout_s=2.0)


class Played:
    """Two workers, and callers that come and go by chance."""

    def __init__(self, seed: int, **worker: object) -> None:
        self.rng = Random(seed)
        self.fleet = Fleet()
        metrics = Metrics(CollectorRegistry())
        self.desk: Desk = desk_of(self.fleet, metrics, raised, queue=EARLY)
        for name in ("w0", "w1"):
            self.fleet.add(name, **{"total_slots": 2} | worker)
        self.running: list[Reservation] = []
        self.refused = 0

    def arrive(self) -> None:
        request = asked(16, first=100 * self.rng.randrange(1000), priority=self.rng.randrange(3))
        if self.rng.random() < 0.3:
            request.allowed_worker_ids.append(self.rng.choice(("w0", "w1")))
        content = request.SerializeToString()
        try:
            answered = self.desk.route(content)
        except Refusal as refusal:
            self.check(refusal)
            return
        if isinstance(answered, Waiting):
            answered.on_done = lambda: self.done(answered)
            if answered.outcome is not None:
                self.done(answered)
        else:
            self.running.append(answered[1])

    def done(self, waiting: Waiting) -> None:
        if isinstance(waiting.outcome, Refusal):
            self.check(waiting.outcome)
        elif waiting.outcome is not None:
            self.running.append(waiting.outcome[1])

    def check(self, refusal: Refusal) -> None:
        """No worker would take any request now."""
        if refusal.reason is not Reason.WAIT_TOO_LONG:
            return
        self.refused += 1
        assert refusal.retry_after_s is not None
        any_request = Request(request_id="", prompt=prompt(1))
        assert not self.fleet.core.decide(any_request, self.fleet.now_s, may_exceed=True).order

    def end(self) -> None:
        if self.running:
            self.desk.cancel(self.running.pop(self.rng.randrange(len(self.running))))
            self.desk.changed()


@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_refused_early_while_a_worker_has_room(seed: int) -> None:
    played = Played(seed)
    for _ in range(600):
        played.fleet.now_s += played.rng.random() * 0.1
        played.rng.choice((played.arrive, played.arrive, played.end, played.desk.dispatch))()
        if played.rng.random() < 0.02:
            played.fleet.say(played.rng.choice(list(played.fleet.relays)))
    counts = played.desk.admission.queue.counts
    assert played.refused == counts[Fate.TOO_LONG] > 0
    assert counts[Fate.DISPATCHED] > 0


def test_requests_held_by_what_is_only_learned_wait_to_the_end() -> None:
    played = Played(0, total_slots=None, running=2, waiting=2, used_blocks=10)
    fleet, desk = played.fleet, played.desk
    for _ in range(3):  # samples that agree: each runs two at once
        fleet.now_s += 0.1
        for key in fleet.relays:
            fleet.say(key)
    for _ in range(3 * LOOKS_MAX):
        played.arrive()
    waiting = len(desk.admission)
    assert waiting > LOOKS_MAX
    fleet.now_s += LOOK_EACH_S
    desk.dispatch()
    assert len(desk.admission) == waiting
    assert played.refused == 0
