"""Listeners of whole processes: which start, over what, and to whom."""

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import grpc
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from kvroute.client import KvRouteClient, Unauthenticated
from router.app.main import cli
from router.app.processes.gateway_process import GatewayApp
from router.app.processes.router_process import RouterApp
from router.config.keys import ConfigError
from router.config.settings.configurations import GatewayConfig
from router.config.settings.gateway_settings import GatewayProcessSettings, GatewaySettings
from router.config.settings.keys_settings import KeysSettings, ProbesSettings
from router.config.settings.picker_settings import PickerSettings
from router.config.settings.request_settings import RequestSettings
from router.config.settings.serving_settings import GrpcSettings, MetricsSettings
from router.net.keys.key_ring import PREFIX, digest
from tests.stage.certificates import Authority, written
from tests.stage.exported import gateway_families, picker_families
from tests.stage.keys import identity, write_keys
from tests.stage.loopback import router_app, serve_config

NOWHERE = "nats://127.0.0.1:1"
"""No broker: a router starts without one, and is not ready."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def test_a_router_without_keys_starts_on_loopback_and_nowhere_else() -> None:
    RouterApp(serve_config(NOWHERE))
    with pytest.raises(ConfigError, match=r"or grpc\.any_address to serve all"):
        RouterApp(serve_config(NOWHERE, grpc=GrpcSettings(listen="0.0.0.0:0")))
    RouterApp(serve_config(NOWHERE, grpc=GrpcSettings(listen="0.0.0.0:0", any_address=True)))


def test_check_config_says_so() -> None:
    result = CliRunner().invoke(cli, ["check-config", "--grpc-listen", "0.0.0.0:0"])
    assert isinstance(result.exception, ConfigError)
    assert "or grpc.any_address to serve all that reach it" in str(result.exception)


def test_check_config_reads_the_key_for_engines(tmp_path: Path) -> None:
    file = tmp_path / "key"
    gateway = ["--gateway-listen", "127.0.0.1:0", "--engines-api-key-file", str(file)]
    result = CliRunner().invoke(cli, ["check-config", *gateway])
    assert isinstance(result.exception, ConfigError)
    assert "No such file or directory - at `$.engines.api_key_file`" in str(result.exception)
    file.write_text("k")
    result = CliRunner().invoke(cli, ["check-config", *gateway])
    assert result.exit_code == 0, result.output


async def test_the_switch_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    grpc = GrpcSettings(listen="0.0.0.0:0", any_address=True)
    async with router_app(serve_config(NOWHERE, grpc=grpc)):
        pass
    (warning,) = [record for record in caplog.records if "any_address" in record.message]
    assert warning.levelname == "WARNING"
    assert "every method" in warning.message


async def test_certificates_of_callers_open_both_ports(
    tmp_path: Path, authority: Authority
) -> None:
    tls = written(tmp_path, authority.issue(), authority)
    everywhere = GatewaySettings(listen="0.0.0.0:0")
    grpc = GrpcSettings(listen="0.0.0.0:0")
    RouterApp(serve_config(NOWHERE, grpc=grpc, gateway=everywhere, tls=tls))
    process = GatewayProcessSettings(listen="0.0.0.0:0")
    GatewayApp(GatewayConfig(gateway=process, tls=tls))
    with pytest.raises(ConfigError, match=r"gateway\.any_address"):
        GatewayApp(GatewayConfig(gateway=process))
    without_ca = written(tmp_path, authority.issue())
    with pytest.raises(ConfigError, match=r"gateway\.any_address"):
        GatewayApp(GatewayConfig(gateway=process, tls=without_ca))


async def test_metrics_and_the_gateway_speak_https_and_probes_do_not(
    tmp_path: Path, authority: Authority
) -> None:
    tls = written(tmp_path, authority.issue(), authority)
    config = serve_config(
        NOWHERE,
        tls=tls,
        metrics=MetricsSettings(listen="127.0.0.1:0", tls="mutual"),
        gateway=GatewaySettings(listen="127.0.0.1:0"),
        probes=ProbesSettings(listen="127.0.0.1:0"),
    )
    certificate, key = authority.issue("scraper", hosts=())
    (tmp_path / "own.crt").write_bytes(certificate)
    (tmp_path / "own.key").write_bytes(key)
    known = ssl.create_default_context(cadata=authority.pem.decode())
    known.load_cert_chain(tmp_path / "own.crt", tmp_path / "own.key")
    unknown = ssl.create_default_context(cadata=authority.pem.decode())
    async with router_app(config) as (app, _), aiohttp.ClientSession() as session:
        for port, path in (
            (app.listeners.metrics_port, "metrics"),
            (app.listeners.gateway_port, "health"),
        ):
            url = f"https://127.0.0.1:{port}/{path}"
            async with session.get(url, ssl=known) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                async with session.get(url, ssl=unknown) as answer:
                    await answer.read()
        probes = f"http://127.0.0.1:{app.listeners.probes_port}"
        async with session.get(f"{probes}/livez") as answer:
            assert (answer.status, await answer.text()) == (200, "serving\n")
        async with session.get(f"{probes}/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "not serving\n")
        async with session.get(f"{probes}/metrics") as answer:
            assert answer.status == 404
        app.core.fleet.ready = True
        async with session.get(f"{probes}/readyz") as answer:
            assert (answer.status, await answer.text()) == (200, "serving\n")
        # The gateway of this process calls the router without TLS.
        url = f"https://127.0.0.1:{app.listeners.gateway_port}/v1/models"
        async with session.get(url, ssl=known) as answer:
            assert await answer.json() == {"object": "list", "data": []}


async def test_a_key_file_opens_addresses_and_the_gateway_inside_needs_no_key_of_its_own(
    tmp_path: Path, authority: Authority
) -> None:
    keys = KeysSettings(file=write_keys(tmp_path, identity("a")))
    config = serve_config(
        NOWHERE,
        keys=keys,
        tls=written(tmp_path, authority.issue()),
        grpc=GrpcSettings(listen="0.0.0.0:0"),
        gateway=GatewaySettings(listen="0.0.0.0:0"),
    )
    async with router_app(config) as (app, _):
        trusting = ssl.create_default_context(cadata=authority.pem.decode())
        async with aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{app.listeners.gateway_port}/v1/models"
            async with session.get(url, ssl=trusting) as answer:
                assert answer.status == 401
            key = {"Authorization": "Bearer a-token"}
            async with session.get(url, ssl=trusting, headers=key) as answer:
                assert await answer.json() == {"object": "list", "data": []}
        credentials = grpc.ssl_channel_credentials(authority.pem)
        target = f"127.0.0.1:{app.listeners.grpc_port}"
        async with KvRouteClient(target, credentials=credentials) as client:
            with pytest.raises(Unauthenticated):
                await client.list_workers()
        async with KvRouteClient(target, credentials=credentials, token="a-token") as client:
            assert await client.list_workers() == []


async def test_a_router_that_stops_serves_calls_as_long_as_its_gateway_does() -> None:
    """The gateway's open requests report to this router, and get their workers from it."""
    app = RouterApp(
        serve_config(
            NOWHERE,
            gateway=GatewaySettings(listen="127.0.0.1:0"),
            requests=RequestSettings(accept_after_stop_s=300.0),
            probes=ProbesSettings(listen="127.0.0.1:0"),
        )
    )
    async with AsyncExitStack() as stack:
        await app.start()
        stack.push_async_callback(app.stop)
        app.core.fleet.ready = True
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = await stack.enter_async_context(
            KvRouteClient(f"127.0.0.1:{app.listeners.grpc_port}", fallback=False)
        )
        gateway = f"http://127.0.0.1:{app.listeners.gateway_port}"
        async with session.get(f"{gateway}/v1/models") as answer:
            assert "Connection" not in answer.headers
        stopping = asyncio.create_task(app.stop())
        await asyncio.sleep(0)
        async with session.get(f"http://127.0.0.1:{app.listeners.probes_port}/readyz") as answer:
            assert answer.status == 503
        assert await client.list_workers() == []
        async with session.get(f"{gateway}/v1/models") as answer:
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
        await asyncio.wait_for(stopping, 60)  # no connection is left, so that nothing is waited for


@pytest.mark.parametrize("text", ["identities: 5", "[", "identities: []\nidentities: []"])
def test_a_key_file_that_can_not_be_read_stops_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text, encoding="utf-8")
    for path in (file, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"keys\.file"):
            RouterApp(serve_config(NOWHERE, keys=KeysSettings(file=str(path))))


async def test_commands_bring_certificates_and_tokens(tmp_path: Path, authority: Authority) -> None:
    """The flags of `kvroute workers` against a router with TLS and keys."""
    config = serve_config(
        NOWHERE,
        keys=KeysSettings(file=write_keys(tmp_path, identity("a", rights=("observe",)))),
        tls=written(tmp_path, authority.issue(hosts=("router.example",))),
    )
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    (tmp_path / "token").write_text("a-token\n", encoding="utf-8")
    tls = ["--tls-ca", str(tmp_path / "ca.pem"), "--tls-name", "router.example"]
    token = ["--token-file", str(tmp_path / "token")]
    async with router_app(config) as (app, _):
        target = ["--target", f"127.0.0.1:{app.listeners.grpc_port}"]

        async def run(*words: str, **environment: str) -> tuple[int, str]:
            runner = CliRunner(env=environment)
            result = await asyncio.to_thread(runner.invoke, cli, [words[0], *target, *words[1:]])
            return result.exit_code, result.output

        code, output = await run("workers", "--json", *tls, *token)
        assert (code, output.strip()) == (0, "{}"), output
        code, output = await run("workers", *tls)
        assert code == 1
        assert "no valid key" in output
        code, output = await run("drain", "w0", *tls, *token)
        assert code == 1
        assert "administer" in output
        variables = {
            "KVROUTE_TARGET_CA": tls[1],
            "KVROUTE_TARGET_NAME": tls[3],
            "KVROUTE_TARGET_TOKEN_FILE": token[1],
        }
        assert (await run("workers", "--json", **variables))[0] == 0


def test_a_token_is_made_with_its_hash() -> None:
    token, hashed = CliRunner().invoke(cli, ["token"]).output.split()
    assert hashed == PREFIX + digest(token).hex()


async def test_metrics_of_the_gateway_and_the_picker_are_beside_the_routers() -> None:
    """One endpoint is scraped, so that every alert and every panel has its series."""
    config = serve_config(
        NOWHERE,
        metrics=MetricsSettings(listen="127.0.0.1:0"),
        gateway=GatewaySettings(listen="127.0.0.1:0"),
        picker=PickerSettings(listen="127.0.0.1:0"),
    )
    async with router_app(config) as (app, _):
        url = f"http://127.0.0.1:{app.listeners.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
    families = list(text_string_to_metric_families(text))
    written = [family.name for family in families]
    assert len(written) == len(set(written))
    ports = {family.name for family in (*gateway_families(), *picker_families())}
    assert ports <= set(written)
    (connections,) = [one for one in families if one.name == "kvroute_http_connections"]
    ports = [one.labels["port"] for one in connections.samples if one.labels["kind"] == "open"]
    assert sorted(ports) == ["gateway", "grpc", "metrics", "picker"]
