"""Requests that wait until their answers fit beside those that still grow."""

import pytest
from prometheus_client import CollectorRegistry

from indexer.kernel import NativeIndex
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.config.settings.queue_settings import QueueSettings
from tests.stage.fleet import Fleet
from tests.stage.served import asked, desk_of, raised

PROMPT_TOKENS = 96
OUTPUT_TOKENS = 160
"""Six blocks of 16 and ten: three such requests fill a worker."""
BLOCKS = 48


def one_worker(native: bool) -> tuple[Fleet, Desk]:
    fleet = Fleet(index=NativeIndex()) if native else Fleet()
    desk = desk_of(fleet, Metrics(CollectorRegistry()), raised, queue=QueueSettings(timeout_s=1e6))
    fleet.add("w0", total_blocks=BLOCKS, used_blocks=0)
    return fleet, desk


def route(desk: Desk, number: int) -> None:
    request = asked(PROMPT_TOKENS, first=10_000 * number, expected_output_tokens=OUTPUT_TOKENS)
    desk.route(request.SerializeToString())


@pytest.mark.parametrize("native", [True, False])
def test_requests_that_begin_together_go_only_as_far_as_all_fit_at_their_end(native: bool) -> None:
    fleet, desk = one_worker(native)
    for number in range(6):
        route(desk, number)
    assert len(fleet.core.reservations) == 3
    assert len(desk.admission) == 3


@pytest.mark.parametrize("native", [True, False])
def test_one_more_goes_where_the_others_end_one_after_the_other(native: bool) -> None:
    fleet, desk = one_worker(native)
    (key,) = fleet.relays
    for number in range(3):
        route(desk, number)
        fleet.now_s += 3
    # Twenty tokens a second: 180, so the first has brought out all; 120 and 60 of the others.
    route(desk, 3)
    assert len(desk.admission) == 1  # the engine has not said yet that they grew
    fleet.say(key, used_blocks=18 + 22)
    desk.dispatch()
    assert len(desk.admission) == 1  # the first one holds its blocks as long as it is open
    first = fleet.core.reservations.on_workers([key])[0]
    desk.cancel(first)
    fleet.say(key, used_blocks=12 + 11)
    desk.dispatch()
    assert len(desk.admission) == 0
    assert sum(tokens for _, tokens in fleet.core.fleet.load(key).outputs) == 3 * OUTPUT_TOKENS


@pytest.mark.parametrize("native", [True, False])
def test_staggered_requests_run_in_less_than_the_sum_of_their_ends(native: bool) -> None:
    fleet, desk = one_worker(native)
    (key,) = fleet.relays
    for number in range(3):
        fleet.now_s += 3
        route(desk, number)
    # 120, 60 and 0 tokens are out; the ends come 2, 5 and 8 s from now.
    fleet.say(key, used_blocks=18 + 12)
    route(desk, 3)
    assert len(fleet.core.reservations) == 4
    route(desk, 4)
    assert len(desk.admission) == 1


def test_what_is_expected_goes_with_the_reservation() -> None:
    fleet, desk = one_worker(native=True)
    (key,) = fleet.relays
    for number in range(3):
        route(desk, number)
    for reservation in fleet.core.reservations.on_workers([key]):
        desk.cancel(reservation)
    assert fleet.core.fleet.load(key).outputs.tokens == 0
