"""Who sees which decisions: a share of them, drawn at random, whatever way they take."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.api.desk.stream_items import RouteItems, read_batch
from router.app.processes.router_process import RouterApp
from router.config.keys import ConfigError
from router.config.settings.configurations import ServeConfig
from router.config.settings.routing_settings import GuardSettings, RoutingSettings
from router.config.settings.serving_settings import DecisionLogSettings
from router.decide.decision.decision import Decision
from router.decide.decision.nobody_fits import NobodyFits
from router.decide.policies import POLICIES
from router.observe.audit.sampling import Sampled, Watch
from router.observe.audit.shadow_policy import Shadow
from router.request.refusal import Reason, Refusal, Refused
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked, desk_of, raised, refusal, served


class Seen:
    """A watcher that remembers request ids."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def watch(self, decision: Decision) -> None:
        self.request_ids.append(decision.request.request_id)


def fail(error: Exception) -> None:
    raise error


def watch_of(share: float, seen: Seen, seed: int = 3) -> Watch:
    return Watch([Sampled(seen.watch, share)], random.Random(seed), fail)


def taken(watch: Watch, count: int) -> list[bool]:
    return [watch.take() is not None for _ in range(count)]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_watcher_sees_its_share(share: float) -> None:
    drawn = taken(watch_of(share, Seen()), 20_000)
    assert sum(drawn) / 20_000 == pytest.approx(share, rel=0.15)
    pairs = sum(one and other for one, other in pairwise(drawn))
    assert pairs / 20_000 == pytest.approx(share**2, abs=0.01)  # each drawn by itself


def test_each_of_several_watchers_sees_its_own_share() -> None:
    fleet, often, seldom = Fleet(), Seen(), Seen()
    fleet.add("w0", total_slots=None, total_blocks=None)
    sampled = [Sampled(often.watch, 0.5), Sampled(seldom.watch, 0.1)]
    watch = Watch(sampled, random.Random(5), fail)
    for _ in range(1_000):
        fleet.core.route(fleet.request(prompt(8)), fleet.now_s, watch=watch.take())
    assert len(often.request_ids) == pytest.approx(500, abs=60)
    assert len(seldom.request_ids) == pytest.approx(100, abs=40)


def test_a_watcher_that_fails_is_counted_and_told_once_and_no_request_minds() -> None:
    def broken(_: Decision) -> None:
        raise RuntimeError("no eyes")

    told: list[Exception] = []
    fleet = Fleet()
    fleet.add("w0")
    watch = Watch([Sampled(broken, 1.0)], random.Random(5), told.append)
    for _ in range(3):
        fleet.core.route(fleet.request(prompt(8)), fleet.now_s, watch=watch.take())
    assert watch.failures == 3
    assert [str(one) for one in told] == ["no eyes"]
    assert len(fleet.core.reservations) == 3


def test_a_watcher_sees_the_fleet_before_anything_is_reserved() -> None:
    fleet = Fleet(policy="ttft")
    key = fleet.add("w0")
    slots: list[float] = []
    watch = Watch([Sampled(lambda one: slots.append(one.rows.reserved[0]), 1.0)],
                  random.Random(5), fail)  # fmt: skip
    for _ in range(3):
        fleet.core.route(fleet.request(prompt(8)), fleet.now_s, watch=watch.take())
    assert slots == [0.0, 1.0, 2.0]
    assert fleet.loads()[key][0] == 3


def test_a_watcher_that_fails_at_a_refusal_is_counted_and_others_see_it() -> None:
    def broken(_: Refused) -> None:
        raise RuntimeError("no eyes")

    told: list[Exception] = []
    seen: list[Refused] = []
    both = [Sampled(print, 1.0, broken), Sampled(print, 1.0), Sampled(print, 1.0, seen.append)]
    due = Watch(both, random.Random(5), told.append).take()
    assert due is not None
    lost = Refused(Refusal(Reason.NO_WORKER, "nobody"), 7.0)
    due.refused(lost)
    assert ([str(one) for one in told], seen) == (["no eyes"], [lost])


async def test_every_refusal_is_watched_whatever_raised_it() -> None:
    seen: list[Refused] = []
    watch = Watch([Sampled(lambda _: None, 1.0, seen.append)], random.Random(5), fail)
    async with served(watch=watch, index=NativeIndex()) as stage:
        await refusal(stage.router.Route(asked(request_id="early", model="m")))
        stage.fleet.add("w0", total_slots=1, running=1)
        await refusal(stage.router.Route(asked(40, request_id="full")))
        await refusal(stage.router.Route(router_pb2.RouteRequest(request_id="empty", model="m")))
        item = router_pb2.RouteItem(index=1, request=asked(request_id="odd", policy="nonsense"))
        call = stage.router.RouteStream()
        await call.write(router_pb2.RouteBatch(items=[item]))
        await call.done_writing()
        assert len([one async for results in call for one in results.results]) == 1
        await refusal(stage.channel.unary_unary("/kvroute.v1.Router/Route")(b"\xff"))
    told = [(one.request_id, one.refusal.reason, one.prompt_tokens) for one in seen]
    assert told == [
        ("early", Reason.NO_WORKER, 100),
        ("full", Reason.ALL_WORKERS_FULL, 40),
        ("empty", Reason.EMPTY_PROMPT, 0),
        ("odd", Reason.UNKNOWN_POLICY, 100),
        ("", Reason.INVALID_FIELD, 0),
    ]
    full = seen[1].refusal
    assert isinstance(full, NobodyFits)
    assert full.decision is not None
    assert full.decision.exclusions() == {"full": 1}


async def test_every_way_of_asking_is_watched() -> None:
    seen = Seen()
    async with served(watch=watch_of(1.0, seen), index=NativeIndex()) as stage:
        stage.fleet.add("w0")
        await stage.router.Route(asked(request_id="alone"))
        items = [
            router_pb2.RouteItem(index=i, request=asked(request_id=f"r{i}", first=i))
            for i in range(40)
        ]
        call = stage.router.RouteStream()
        await call.write(router_pb2.RouteBatch(items=items))
        await call.done_writing()
        answers = [one async for results in call for one in results.results]
        assert len(answers) == 40
    assert seen.request_ids == ["alone", *(f"r{i}" for i in range(40))]


def stream_of_answers(desk: Desk, count: int) -> list[str]:
    """Which worker each of many items of batches gets."""
    items = RouteItems(desk.item, desk.cancel, desk.leave)
    picked: dict[int, str] = {}
    for first in range(0, count, 50):
        batch = router_pb2.RouteBatch(
            items=[
                router_pb2.RouteItem(index=i, request=asked(64, first=i % 7, request_id=f"r{i}"))
                for i in range(first, first + 50)
            ]
        )
        for message in items.decide(read_batch(batch.SerializeToString())):
            for one in router_pb2.RouteResults.FromString(message).results:
                picked[one.index] = one.response.worker_id
    return [picked[i] for i in range(count)]


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_who_watches_changes_no_pick(share: float) -> None:
    picked = []
    shadow, seen = Shadow(POLICIES["dynamo-blocks"], GuardSettings()), Seen()
    both = [Sampled(shadow.watch, share), Sampled(seen.watch, share)]
    for watch in (None, Watch(both, random.Random(9), fail)):
        fleet = Fleet(index=NativeIndex(), seed=11)
        for i in range(6):
            fleet.add(f"w{i}")
        metrics = Metrics(CollectorRegistry())
        desk = desk_of(fleet, metrics, raised, watch=watch)
        picked.append(stream_of_answers(desk, 600))
    assert picked[0] == picked[1]
    assert len(set(picked[0])) > 1
    assert len(seen.request_ids) == pytest.approx(600 * share, abs=60)
    assert shadow.decisions.total() == pytest.approx(600 * share, abs=60)


def config(**changes: Any) -> ServeConfig:
    routing = {name: value for name, value in changes.items() if name.startswith("shadow")}
    log = {name: value for name, value in changes.items() if name not in routing}
    return ServeConfig(routing=RoutingSettings(**routing), decision_log=DecisionLogSettings(**log))


def told(app: RouterApp, name: str, **labels: str) -> float | None:
    return app.registry.get_sample_value(name, labels)


async def test_a_router_watches_what_is_configured_and_nothing_else(tmp_path: Path) -> None:
    assert not RouterApp(ServeConfig()).watchers.watch
    file = tmp_path / "log"
    settings = config(shadow_policy="ttft", shadow_share=1.0, file=str(file), share=0.001)
    app = RouterApp(settings)
    assert not file.exists()  # nothing is done before the start
    await app.watchers.use(settings)
    assert app.watchers.watch.take() is not None, "the shadow policy sees every decision"
    assert told(app, "kvroute_shadow_decisions_total", agreement="other") == 0
    assert told(app, "kvroute_shadow_ttft_seconds_total", change="gain") == 0
    assert told(app, "kvroute_records_total", what="decision_log", result="written") == 0
    assert told(app, "kvroute_failures_total", what="watch", kind="", policy="") == 0
    app.watchers.log.close()
    with pytest.raises(ConfigError, match=r"shadow_policy"):
        RouterApp(config(shadow_policy="nonsense"))


async def test_watchers_come_and_go_and_count_on(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.add("w0")
    app = RouterApp(ServeConfig())
    watchers = app.watchers

    def counted() -> tuple[float | None, float | None]:
        fleet.core.route(fleet.request(prompt(8)), fleet.now_s, watch=watchers.watch.take())
        return (
            told(app, "kvroute_shadow_decisions_total", agreement="same"),
            told(app, "kvroute_failures_total", what="watch", kind="", policy=""),
        )

    assert counted() == (None, None)
    await watchers.use(config(shadow_policy="least-loaded", shadow_share=1.0))
    assert counted() == (1, 0)
    file = str(tmp_path / "log")
    await watchers.use(config(shadow_policy="least-loaded", shadow_share=1.0, file=file, share=1.0))
    assert counted() == (2, 0)
    await watchers.use(config(shadow_policy="ttft", shadow_share=1.0, file=file, share=1.0))
    assert counted() == (1, 0)
    with pytest.raises(ConfigError, match="folder"):
        await watchers.use(config(file=str(tmp_path / "no" / "folder")))
    assert counted() == (2, 0)
    await watchers.use(config(file=file, share=1.0))
    assert counted() == (None, 0)
    await watchers.use(config())
    assert (len(watchers.watch), counted()) == (0, (None, None))
    watchers.log.close()
    assert watchers.log.lines == {"written": 4}
