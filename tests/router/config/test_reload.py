"""What of a configuration takes effect while a router runs."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.plane.settings import NatsSettings
from router.api.desk.methods import ROUTE, ROUTE_STREAM
from router.app.processes.router_process import RouterApp
from router.config.keys import ConfigError
from router.config.reading import load
from router.config.reload import RELOADED, reloaded
from router.config.settings.configurations import ModelSettings, ServeConfig
from router.config.settings.fleet_settings import FleetSettings
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.routing_settings import (
    HotPrefixSettings,
    ModelRoutingSettings,
    RoutingSettings,
)
from router.config.settings.serving_settings import DecisionLogSettings
from router.request.refusal import Refusal
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked

TYPO = (ModelSettings(name="m", routing=ModelRoutingSettings(policy="no-such")),)
SHADOW = RoutingSettings(shadow_policy="ttft", shadow_share=1.0)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [{"models": TYPO}, {"queue": QueueSettings(order="no-such")}],
    ids=["models", "queue"],
)
async def test_a_reload_that_fails_leaves_all_as_it_was(
    watched: bool, wrong: dict[str, Any]
) -> None:
    base = ServeConfig(models=(ModelSettings(name="m"),))
    base = msgspec.structs.replace(base, nats=NatsSettings(url="nats://127.0.0.1:1"))
    shadowed = msgspec.structs.replace(base, routing=SHADOW)
    first, second = (shadowed, base) if watched else (base, shadowed)
    files = iter([first, msgspec.structs.replace(second, **wrong)])
    app = RouterApp(base, read_again=partial(next, files))
    await app.reload()
    await app.reload()
    assert app.metrics.reads.labels("config", "failed")._value.get() == 1
    assert (app.watchers.shadow is not None, bool(app.watchers.watch)) == (watched, watched)
    assert app.watchers.timed is watched
    assert app.core.watched is app.watchers
    for _ in range(3):  # calls are refused for want of a worker, by nothing else
        with pytest.raises(Refusal, match="no worker is known yet"):
            app.desk.route(asked(40).SerializeToString())
    assert app.watchers.watch.failures == 0


def test_routing_changes_at_once_and_the_rest_waits() -> None:
    running = ServeConfig()
    read = ServeConfig(
        routing=RoutingSettings(
            policy="ttft", lease_s=7.0, parameters={"ttft": {"keep": 2.0}}, alternatives=5
        ),
        fleet=FleetSettings(name="other"),
    )
    config, changed, waiting = reloaded(running, read)
    assert changed == ["routing.policy", "routing.alternatives", "routing.parameters.ttft"]
    assert waiting == ["fleet.name", "routing.lease_s"]
    assert (config.routing.policy, config.routing.alternatives) == ("ttft", 5)
    assert (config.routing.lease_s, config.fleet.name) == (120.0, "default")
    assert reloaded(config, config) == (config, [], [])


def test_what_is_switched_on_and_off_changes_at_once_key_by_key() -> None:
    running = ServeConfig()
    read = ServeConfig(
        routing=RoutingSettings(
            shadow_policy="ttft",
            shadow_share=0.5,
            hot_prefixes=HotPrefixSettings(enabled=True),
        ),
        decision_log=DecisionLogSettings(file="log", share=1.0),
    )
    config, changed, waiting = reloaded(running, read)
    assert changed == [
        "routing.shadow_policy",
        "routing.shadow_share",
        "routing.hot_prefixes.enabled",
        "decision_log.file",
        "decision_log.share",
    ]
    assert (config, waiting) == (read, [])


def test_settings_of_models_change_at_once_and_models_themselves_wait() -> None:
    def model(name: str, policy: str | None, **about: Any) -> ModelSettings:
        own = ModelRoutingSettings(policy=policy) if policy else None
        return ModelSettings(name, routing=own, **about)

    running = ServeConfig(models=(model("a", "ttft"), model("b", None), model("c", "ttft")))
    read = ServeConfig(models=(model("b", "round-robin", aliases=("x",)), model("a", None)))
    config, changed, waiting = reloaded(running, read)
    assert config.models == (model("a", None), model("b", "round-robin"), model("c", None))
    assert (changed, waiting) == (["models"], ["models"])
    again = ServeConfig(models=tuple(reversed(config.models[:2])))
    assert reloaded(config, again)[2] == ["models"]


def test_every_reloaded_key_is_one_of_routing() -> None:
    assert set(RELOADED) < set(RoutingSettings.__struct_fields__)


async def test_a_router_that_leaves_reads_nothing_any_more() -> None:
    reads = []

    def read_again() -> ServeConfig:
        reads.append(1)
        return ServeConfig()

    app = RouterApp(ServeConfig(), read_again=read_again)
    await app.reload()
    app._stopping.set()
    await app.reload()
    assert len(reads) == 1


async def test_longer_prompts_have_room_in_messages_after_a_reload() -> None:
    base = ServeConfig(nats=NatsSettings(url="nats://127.0.0.1:1"))
    longer = msgspec.structs.replace(base, routing=RoutingSettings(prompt_tokens_max=4 << 20))
    app = RouterApp(base, read_again=lambda: longer)
    guard, content = app._guard, bytes(10 << 20)
    route, batch = guard.limits.of(ROUTE), guard.limits.of(ROUTE_STREAM)
    with pytest.raises(Refusal, match="the limit is 8388608"):
        route.check(len(content))
    before = guard.bytes_max(ROUTE_STREAM)
    await app.reload()
    route.check(len(content))  # of handlers that hold it since the start
    assert (route.bytes_max, batch.bytes_max) == (21 << 20, 22 << 20)
    assert guard.bytes_max(ROUTE_STREAM) == 22 << 20 > before
    with guard.message(ROUTE, content):
        pass


async def test_a_reload_takes_the_place_of_an_earlier_one_that_waits_for_the_disk(
    tmp_path: Path,
) -> None:
    """A FIFO without a reader can't be opened, as a file of a server that is gone."""
    os.mkfifo(hangs := tmp_path / "hangs")
    base = ServeConfig(nats=NatsSettings(url="nats://127.0.0.1:1"))
    waits = msgspec.structs.replace(
        base, decision_log=DecisionLogSettings(file=str(hangs)), routing=SHADOW
    )
    routing = RoutingSettings(policy="round-robin")
    later = [waits, msgspec.structs.replace(base, routing=routing)]
    app = RouterApp(base, read_again=lambda: later.pop(0))
    app._on_hangup()
    first = app._reloading
    await asyncio.sleep(0)
    assert len(later) == 1
    app._on_hangup()
    assert app._reloading is not None
    await app._reloading
    assert first is not None
    assert first.cancelled()
    with hangs.open("rb"):
        await asyncio.gather(*app._tasks._running)
    assert app.config.routing.policy == "round-robin"
    assert app.watchers.shadow is None
    assert not app.watchers.log.is_on


def settings(**changes: object) -> RoutingSettings:
    return msgspec.structs.replace(RoutingSettings(), **changes)


def test_a_core_decides_by_what_it_was_told_last() -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.add(name)
    fleet.cache(fleet.add("c"), prompt(640))
    assert fleet.route(prompt(640)).decision.policy.name == "dynamo-adaptive"
    fleet.core.reconfigure(settings(policy="round-robin"))
    assert fleet.picked(prompt(640)) != fleet.picked(prompt(640))
    gamma = {"dynamo-adaptive": {"gamma": 0.25}}
    fleet.core.reconfigure(settings(parameters=gamma))
    assert fleet.route(prompt(640)).decision.policy.parameters["gamma"] == 0.25


def test_pairs_are_decided_by_what_was_told_last() -> None:
    fleet = Fleet()
    fleet.add("p", role="prefill")
    fleet.add("d", role="decode")
    for tokens, how in ((256, "remote"), (2000, "local")):
        fleet.core.reconfigure(settings(local_prefill_tokens=tokens, prefill_policy="ttft"))
        decision = fleet.route(prompt(1600, 9_000 * tokens), role=Role.PAIR).decision
        assert decision.how == how
        assert decision.prefill is not None
        assert decision.prefill.policy.name == "ttft"


def test_a_wrong_policy_changes_nothing() -> None:
    fleet = Fleet()
    fleet.add("a")
    before = fleet.core.routing
    for wrong in (settings(policy="nobody"), settings(parameters={"ttft": {"kep": 1.0}})):
        with pytest.raises(ConfigError):
            fleet.core.reconfigure(wrong)
    assert fleet.core.routing is before
    assert fleet.route(prompt(64)).decision.policy.name == "dynamo-adaptive"


@pytest.mark.parametrize("content", ["[" * 1100, "!!int ''", "a: \x00", "index: {memory_mib: 9e9}"])
async def test_a_hostile_file_is_a_failed_reload(tmp_path: Path, content: str) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text("nats: {url: 'nats://127.0.0.1:1'}\n")
    read = partial(load, ServeConfig, file, {}, {})
    app = RouterApp(read(), read_again=read)
    file.write_text(content)
    before = app.config
    await app.reload()
    assert app.config is before
    value = app.registry.get_sample_value
    assert value("kvroute_reads_total", {"source": "config", "result": "failed"}) == 1
    file.write_text("nats: {url: 'nats://127.0.0.1:1'}\nrouting: {policy: ttft}\n")
    await app.reload()
    assert app.config.routing.policy == "ttft"


async def test_a_policy_that_raises_anything_when_it_is_read_is_a_failed_reload() -> None:
    def read() -> ServeConfig:
        raise ZeroDivisionError

    app = RouterApp(ServeConfig(nats=NatsSettings(url="nats://127.0.0.1:1")), read_again=read)
    await app.reload()
    value = app.registry.get_sample_value
    assert value("kvroute_reads_total", {"source": "config", "result": "failed"}) == 1
