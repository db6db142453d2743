"""The references in docs/ are what the code makes of itself."""

from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from events.plane.clock import unix_now
from kvroute import v1
from kvroute.client import KvRouteClient
from router.app.cli.flags import KeyOption, SharedOption
from router.config.settings.gateway_settings import GatewaySettings
from router.gateway.refusals import STATUS, GatewayReason
from router.gateway.server.counters import OWN_PATHS
from router.gateway.server.gateway import Gateway
from router.net.http.port import HttpPort
from router.net.listener.http_bounds import HttpBounds
from router.observe.metrics.ports import MetricsServer, ProbeServer
from router.request.bodies import PATHS
from router.request.refusal import Reason
from tests.docs.reference import PAGES
from tests.docs.reference.commands import commands
from tests.docs.reference.configuration import PROGRAMS, rows_of
from tests.docs.reference.contract import FILES, blocks_of
from tests.docs.reference.ports import PORTS
from tests.stage.console import pages_of, play
from tests.stage.pages import text_of


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_a_page_is_fresh(path: Path) -> None:
    """After a change of an option, a key, a metric, a status or the contract:
    python -m tests.docs.reference."""
    assert text_of(path).split() == PAGES[path]().split()


def test_each_command_has_a_section_and_each_option_a_row() -> None:
    """In its command's table, in one that the section links to, or as a key of configuration."""
    made = text_of(Path("docs/reference-commands.md"))
    keys = text_of(Path("docs/reference-configuration.md"))

    def of(heading: str) -> str:
        return made.split(f"\n## {heading}\n")[1].split("\n## ")[0]

    for name, command in commands():
        section = of(name)
        for option in command.params:
            if getattr(option, "hidden", False):
                continue
            named = [flag for flag in option.opts if flag.startswith("--")]
            if isinstance(option, KeyOption):
                assert "reference-configuration.md#" in section, name
                assert f"{option.key.dotted}`" in keys, (name, option.name)
                named = [flag for flag in named if flag != option.key.flag]
            rows = section
            if isinstance(option, SharedOption) and f"[{option.shared_as.lower()}](#" in section:
                rows += of(option.shared_as)
            assert [flag for flag in named if flag not in rows] == [], name


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_key_says_what_it_means(program: str) -> None:
    silent = [row.name for row in rows_of(PROGRAMS[program]) if not row.meaning]
    assert silent == []


def test_a_reason_is_called_as_its_value() -> None:
    reasons = [*Reason, *GatewayReason]
    assert [reason.name for reason in reasons] == [reason.value for reason in reasons]
    assert len(STATUS) == len(reasons)


def test_the_contract_is_read_whole() -> None:
    """By the descriptors of the generated code: no field, value or method is left out."""
    blocks = {block.name: block for name in FILES for block in blocks_of(name)}
    for module in (v1.router_pb2, v1.fleet_pb2, v1.prompts_pb2):
        file = module.DESCRIPTOR
        for name, message in file.message_types_by_name.items():
            read = {one.name: one.number for one in blocks.pop(name).members}
            assert read == {one.name: str(one.number) for one in message.fields}, name
        for name, values in file.enum_types_by_name.items():
            read = {one.name: one.number for one in blocks.pop(name).members}
            assert read == {one.name: str(one.number) for one in values.values}, name
        for name, service in file.services_by_name.items():
            assert [one.name for one in blocks.pop(name).members] == list(service.methods_by_name)
    assert blocks == {}


async def test_the_paths_are_those_that_the_servers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: dict[str, web.Application] = {}
    begin = HttpPort.__init__

    def noted(port: HttpPort, app: web.Application, *words: object, **about: object) -> None:
        apps[f"{about['name']}.listen"] = app
        begin(port, app, *words, **about)  # type: ignore[arg-type]

    monkeypatch.setattr(HttpPort, "__init__", noted)
    at, registry, bounds = "127.0.0.1:0", CollectorRegistry(), HttpBounds()
    MetricsServer(registry, at, bounds, also=pages_of(play()).add_to)
    ProbeServer(at, lambda: True, bounds)
    Gateway(
        GatewaySettings(listen=at),
        KvRouteClient("127.0.0.1:1"),
        registry,
        clock=unix_now,
        broke=lambda error: None,
    )
    gateway = {("POST", path) for path in PATHS} | {("*", "/{path}"), ("OPTIONS", "*")}
    gateway |= {("GET", path.replace("NAME", "{name}")) for path in OWN_PATHS}
    for key, (_, paths) in PORTS.items():
        routes = [route for route in apps[key].router.routes() if route.method != "HEAD"]
        served = {
            (route.method, route.resource.canonical)
            for route in routes
            if route.resource is not None
        }
        if key == "gateway.listen":
            assert served == {("*", "/")}, "one handler, which has tables of its own"
            served = gateway
        written = {
            ("*", "/{path}") if one.method == "any" else (one.method, one.path) for one in paths
        }
        assert served == written, key
