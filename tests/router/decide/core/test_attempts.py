"""What requests cost that wait in vain while their pool has room for others."""

from prometheus_client import CollectorRegistry

from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.config.settings.queue_settings import QueueSettings
from router.decide.core.attempts import ATTEMPT_ROWS, ROWS_MAX, ROWS_PER_S, VainAttempts
from tests.stage.fleet import Fleet
from tests.stage.served import asked, desk_of, raised

WORKERS = 8


def crowded() -> tuple[Fleet, Desk]:
    """Workers with free slots, and more requests than their KV blocks hold."""
    fleet = Fleet()
    desk = desk_of(fleet, Metrics(CollectorRegistry()), raised, queue=QueueSettings(timeout_s=1e6))
    for number in range(WORKERS):
        fleet.add(f"w{number}", total_blocks=60, used_blocks=0)
    for number in range(4 * WORKERS):
        request = asked(800, first=10_000 * number, expected_output_tokens=0)
        desk.route(request.SerializeToString())
    assert len(desk.admission) == 3 * WORKERS
    return fleet, desk


def test_a_heartbeat_that_frees_nothing_has_nothing_tried_again() -> None:
    fleet, desk = crowded()
    before = desk.admission.in_vain.count
    for key in fleet.relays:
        fleet.now_s += 0.001
        fleet.say(key)
        desk.dispatch()
    assert desk.admission.in_vain.count == before


def test_attempts_in_vain_stay_within_their_budget() -> None:
    fleet, desk = crowded()
    key = next(iter(fleet.relays))
    for turn in range(2000):  # each second one gives blocks back, too few for any that waits
        fleet.now_s += 0.001
        fleet.say(key, used_blocks=52 + turn % 2)
        desk.dispatch()
    cost = desk.admission.in_vain.count * (ATTEMPT_ROWS + WORKERS)
    assert 2 * ROWS_PER_S * 0.9 < cost <= ROWS_MAX + 2 * ROWS_PER_S + ATTEMPT_ROWS + WORKERS


def test_room_is_used_however_many_attempts_were_in_vain() -> None:
    fleet, desk = crowded()
    waiting = len(desk.admission)
    reservation, *_ = fleet.core.reservations.on_workers(list(fleet.relays)[:1])
    desk.cancel(reservation)
    desk.dispatch()
    assert len(desk.admission) == waiting - 1


def test_the_bucket_holds_so_much_and_fills_with_time() -> None:
    attempts = VainAttempts()
    assert attempts.may_be(5.0)
    for _ in range(ROWS_MAX // (ATTEMPT_ROWS + 150)):
        assert attempts.may_be(5.0)
        attempts.add(150)
    assert not attempts.may_be(5.0)
    assert not attempts.may_be(4.0), "a clock that was set back fills nothing"
    attempts = VainAttempts()
    attempts.add(10**6)
    assert not attempts.may_be(0.0)
    assert not attempts.may_be((10**6 + ATTEMPT_ROWS - ROWS_MAX) / ROWS_PER_S)
    assert attempts.may_be((10**6 + ATTEMPT_ROWS - ROWS_MAX) / ROWS_PER_S + 0.01)
