"""Four virtual routers share one fleet: bands have their turns, whichever router they wait in."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from router.config.settings.queue_settings import BandSettings, QueueSettings
from simulator.traffic.results import Outcome, RunResult
from simulator.world.options import RouterRestart
from simulator.world.world import World
from tests.simulator.worlds import FOUR_SLOTS, checked, crowd

CHAT = 10


def played(
    priorities: Sequence[int], *, strict: bool = False, tells: bool = True, **more: object
) -> tuple[World, RunResult]:
    """Requests in turn to four routers, every 20 ms, and slots for half of them or less."""
    queue = QueueSettings(
        timeout_s=600.0,
        order="fcfs",
        bands=(BandSettings("batch", 0), BandSettings("chat", CHAT, weight=4.0)),
        bands_strict=strict,
        bands_aging=0.0,
    )
    options = {
        "workers": 2,
        "replicas": 4,
        "scheduler": FOUR_SLOTS,
        "queue": queue,
        "inflight": tells,
        "patience_s": 1000.0,
    } | more
    of = crowd(len(priorities), 0.02)
    ranked = zip(of.requests, priorities, strict=True)
    requests = [replace(each, priority=priority) for each, priority in ranked]
    return checked(replace(of, requests=requests), **options)


NEWS_S = 0.05
"""Messages leave every 20 ms, and are 5 ms on their way; then they have an answer."""


def went_s(result: RunResult) -> np.ndarray:
    return result.arrival_s + result.wait_s


def overtaken(result: RunResult, chat: np.ndarray) -> int:
    """Requests of batch that waited and got a worker while one of chat waited, and went on to."""
    went = went_s(result)
    return sum(
        bool((chat & (result.arrival_s < at_s - NEWS_S) & (went > at_s + NEWS_S)).any())
        for at_s in went[~chat & (result.wait_s > 0)]
    )


def chat_share(result: RunResult, chat: np.ndarray) -> float:
    """Of the turns while requests of both bands waited: the first half of them."""
    waited = result.wait_s > 1.0
    first = waited & (went_s(result) < np.quantile(went_s(result)[waited], 0.5))
    return float((chat & first).sum() / first.sum())


@pytest.mark.parametrize("strict", [True, False])
def test_bands_have_their_turns_though_each_router_has_requests_of_one_band(strict: bool) -> None:
    priorities = [CHAT if number % 2 else 0 for number in range(120)]
    chat = np.array(priorities) == CHAT
    _, silent = played(priorities, strict=strict, tells=False)
    world, result = played(priorities, strict=strict)
    assert 0.4 < chat_share(silent, chat) < 0.6, "each router has the slots that it has"
    if strict:
        assert overtaken(silent, chat) > 30
        assert overtaken(result, chat) == 0
    else:
        assert 0.75 < chat_share(result, chat) < 0.85, "4 of 5"
    ends = [float(np.mean(run.arrival_s + run.e2e_s)) for run in (silent, result)]
    assert ends[1] < 1.01 * ends[0], "no room is left idle for it"
    assert not any(router.admission.fleet_turns.rests for router in world.fleet.routers)


def test_equal_requests_go_nearly_in_the_order_of_arrival_over_all_routers() -> None:
    _, result = played([0] * 120, spread="random")
    went = went_s(result)[result.wait_s > 0.5]
    places = np.argsort(np.argsort(went, kind="stable"))
    assert np.abs(places - np.arange(len(went))).max() <= len(went) / 4


def test_a_router_that_dies_takes_its_demand_with_it() -> None:
    priorities = [CHAT if number % 4 == 1 else 0 for number in range(120)]
    world, result = played(priorities, strict=True, router_restarts=(RouterRestart(3.0, 2),))
    assert world.laws is not None
    assert world.laws.checks["work"] > 0
    assert (result.outcome == Outcome.SERVED).sum() == len(priorities)
