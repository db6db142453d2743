"""Listeners of whole processes: which start, over what, and to whom."""

import ssl
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from router.cli.main import cli
from router.config.configurations import GatewayConfig
from router.config.gateway_settings import GatewayProcessSettings, GatewaySettings
from router.config.keys import ConfigError
from router.config.keys_settings import ProbesSettings
from router.config.serving_settings import GrpcSettings, MetricsSettings
from router.processes.gateway_process import GatewayApp
from router.processes.router_process import RouterApp
from tests.stage.certificates import Authority, written
from tests.stage.loopback import serve_config

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


async def test_the_switch_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    grpc = GrpcSettings(listen="0.0.0.0:0", any_address=True)
    app = RouterApp(serve_config(NOWHERE, grpc=grpc))
    try:
        await app.start()
    finally:
        await app.stop()
    (warning,) = [record for record in caplog.records if "any_address" in record.message]
    assert warning.levelname == "WARNING"
    assert "every method" in warning.message


async def test_certificates_of_callers_open_both_faces(
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
    app = RouterApp(
        serve_config(
            NOWHERE,
            tls=tls,
            metrics=MetricsSettings(listen="127.0.0.1:0", tls="mutual"),
            gateway=GatewaySettings(listen="127.0.0.1:0"),
            probes=ProbesSettings(listen="127.0.0.1:0"),
        )
    )
    certificate, key = authority.issue("scraper", hosts=())
    (tmp_path / "own.crt").write_bytes(certificate)
    (tmp_path / "own.key").write_bytes(key)
    known = ssl.create_default_context(cadata=authority.pem.decode())
    known.load_cert_chain(tmp_path / "own.crt", tmp_path / "own.key")
    unknown = ssl.create_default_context(cadata=authority.pem.decode())
    try:
        await app.start()
        async with aiohttp.ClientSession() as session:
            for port, path in ((app.metrics_port, "metrics"), (app.gateway_port, "health")):
                url = f"https://127.0.0.1:{port}/{path}"
                async with session.get(url, ssl=known) as answer:
                    assert answer.status == 200
                with pytest.raises(aiohttp.ClientError):
                    async with session.get(url, ssl=unknown) as answer:
                        await answer.read()
            probes = f"http://127.0.0.1:{app.probes_port}"
            async with session.get(f"{probes}/livez") as answer:
                assert (answer.status, await answer.text()) == (200, "serving\n")
            async with session.get(f"{probes}/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "not serving\n")
            async with session.get(f"{probes}/metrics") as answer:
                assert answer.status == 404
            app.core.fleet.ready = True
            async with session.get(f"{probes}/readyz") as answer:
                assert (answer.status, await answer.text()) == (200, "serving\n")
            # The gateway of this process reaches the router by a socket of its own.
            url = f"https://127.0.0.1:{app.gateway_port}/v1/models"
            async with session.get(url, ssl=known) as answer:
                assert await answer.json() == {"object": "list", "data": []}
            assert app._gateway is not None
            assert app._gateway.roster.ready is False
    finally:
        await app.stop()
