"""What relays and routers may do over NATS, and what a relay's start-up probe sees."""

import asyncio
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from events.plane import subjects
from events.plane.broker import Broker
from events.plane.nats_check import on_loopback
from events.plane.permissions import (
    PROBE_ID,
    Rights,
    beyond_relay,
    nsc_commands,
    of_relay,
    of_router,
    refused,
    server_config,
)
from indexer.identity import WorkerKey
from router.app.offline.nats_permissions import nats_permissions
from tests.stage.loopback import a_broker
from tests.stage.nats_server import nats_server
from tests.stage.waiting import repeated, until

PAGE = Path(__file__).parents[3] / "docs" / "nats.md"


@pytest.fixture(autouse=True)
def passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RELAY_A", "RELAY_WIDE", "RELAY_FACTS", "ROUTER"):
        monkeypatch.setenv(f"{name}_PASSWORD", "secret")


def user_of(url: str, user: str) -> AbstractAsyncContextManager[Broker]:
    return a_broker(url, user, user=user, password="secret")


def test_the_rights_are_those_of_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for rights in (of_relay("default", ["a"]), of_router("default")):
        for subject in (*rights.publish, *rights.subscribe):
            assert f'"{subject}"' in page


def test_the_page_has_a_row_for_each_plane_in_its_form() -> None:
    ends = {"worker": ".<w>.<r>", "replica": ".<replica>", "fleet": ""}
    page = PAGE.read_text(encoding="utf-8")
    for plane in subjects.PLANES:
        assert f"| `kvroute.v1.<f>.{plane.name}{ends[plane.whose]}` |" in page


def test_a_worker_id_is_escaped_and_a_relay_may_have_several() -> None:
    rights = of_relay("f", ["a.b>", "*"])
    assert rights.publish[:2] == ("kvroute.v1.f.facts.a%2Eb%3E.*", "kvroute.v1.f.load.a%2Eb%3E.*")
    assert "kvroute.v1.f.warm.%2A.*" in rights.subscribe


@pytest.mark.long
async def test_a_real_server_refuses_a_relay_all_that_is_beyond_it(tmp_path: Path) -> None:
    """Commands among them: the fence that routers rely on."""
    wide = Rights(("kvroute.v1.>",), (">",))
    facts = of_relay("f", ["a"])
    facts = Rights((*facts.publish, "kvroute.v1.f.facts.*.*"), facts.subscribe)
    users = {
        "router": of_router("f"),
        "relay-a": of_relay("f", ["a"]),
        "relay-wide": wide,
        "relay-facts": facts,
    }
    commands: list[bytes] = []

    async def on_command(message: object) -> None:
        commands.append(message.data)  # type: ignore[attr-defined]

    async with (
        nats_server(tmp_path, server_config("f", users)) as server,
        user_of(server.url, "router") as router,
        user_of(server.url, "relay-a") as relay,
        user_of(server.url, "relay-wide") as wide_relay,
        user_of(server.url, "relay-facts") as facts_relay,
    ):
        await router.subscribe(subjects.control("f"), on_command)
        assert await relay.allowed(beyond_relay("f")) == []
        assert +relay.counts == {}  # refusals that were meant are no errors
        assert commands == []
        excess = await facts_relay.allowed(beyond_relay("f"))
        assert [one.subject for one in excess] == [subjects.facts("f", WorkerKey(PROBE_ID, 0))]
        assert await wide_relay.allowed(beyond_relay("f")) == list(beyond_relay("f"))
        await until(lambda: commands == [b""], "the command that only the wide relay could send")
        # Later on, a refusal counts.
        refused = partial(relay.counts.__getitem__, "error")
        await repeated(lambda: relay.publish(subjects.control("f"), b"x"), refused, "a refusal")
        # What it needs, it has.
        heard = asyncio.Event()

        async def on_facts(_message: object) -> None:
            heard.set()

        await router.subscribe(subjects.all_of("f", "facts"), on_facts)
        fact = subjects.facts("f", WorkerKey("a", 0))
        await repeated(lambda: relay.publish(fact, b""), heard.is_set, "what it needs")


def test_the_command_prints_both_forms() -> None:
    arguments = ["--worker", "a", "--worker", "b.c", "--fleet", "f"]
    server = CliRunner().invoke(nats_permissions, arguments)
    users = {
        "router": of_router("f"),
        "relay-a": of_relay("f", ["a"]),
        "relay-b-c": of_relay("f", ["b.c"]),
    }
    assert (server.exit_code, server.output) == (0, server_config("f", users))
    nsc = CliRunner().invoke(nats_permissions, [*arguments, "--format", "nsc", "--account", "kv"])
    assert (nsc.exit_code, nsc.output) == (0, nsc_commands("kv", users))
    assert '--allow-sub "kvroute.v1.f.snapshot.a.*,kvroute.v1.f.warm.a.*,' in nsc.output
    together = CliRunner().invoke(nats_permissions, [*arguments, "--together"])
    both = {"router": of_router("f"), "relay": of_relay("f", ["a", "b.c"])}
    assert together.output == server_config("f", both)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fleet", "a.b"],
        ["--fleet", "x\n"],
        ["--account", "a; rm"],
        ["--worker", ""],
        ["--worker", "a.b", "--worker", "a/b"],
    ],
)
def test_the_command_refuses_names_that_would_change_the_text(arguments: list[str]) -> None:
    assert CliRunner().invoke(nats_permissions, arguments).exit_code == 2


def test_a_refusal_is_read_from_the_servers_error() -> None:
    text = "nats: 'permissions violation for publish to \"kvroute.v1.f.control\"'"
    assert refused(text) == (True, "kvroute.v1.f.control")
    text = 'nats: \'permissions violation for subscription to "a.*" using queue "x"\''
    assert refused(text) == (False, "a.*")
    assert refused("nats: 'authorization violation'") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_loopback_is_seen(host: str) -> None:
    assert on_loopback(f"nats://u:p@{host}:4222")
    assert not on_loopback(f"nats://{host}@10.0.0.1:4222")
