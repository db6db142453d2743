"""NATS off loopback is connected to over TLS, or not at all, unless the switch is set."""

import asyncio
from pathlib import Path

import pytest

from events.plane import broker as module
from events.plane.broker import Broker
from events.plane.settings import EngineSettings, NatsSettings
from router.app.processes.checks import checked_broker
from router.app.processes.relay_process import RelayApp
from router.app.processes.risks import warnings_of
from router.config.keys import ConfigError
from router.config.settings.configurations import RelayConfig
from tests.stage.certificates import Authority, written
from tests.stage.nats_server import nats_server
from tests.stage.tcp import tcp_server
from tests.stage.waiting import until

GUARD_S = 60.0


@pytest.mark.parametrize("url", ["nats://nats:4222", "ws://nats:80", "nats://10.0.0.1:4222"])
def test_a_server_off_loopback_needs_tls_or_the_switch(
    url: str,
) -> None:
    with pytest.raises(ConfigError, match=r"no TLS: set .* or nats\.allow_plaintext to let"):
        checked_broker(NatsSettings(), url, "test")
    settings = NatsSettings(url=url, user="u", allow_plaintext=True)
    checked_broker(settings, url, "test")
    (warning,) = warnings_of(RelayConfig(nats=settings))
    assert warning.startswith("nats.allow_plaintext is set")
    assert url in warning


def test_the_refusal_shows_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        checked_broker(NatsSettings(), "nats://user:hunter2@nats:4222", "test")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["tls://nats:4222", "wss://nats:443", "nats://127.0.0.1:4222", "ws://localhost:80"]
)
def test_encrypted_or_local_connections_need_no_switch(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    checked_broker(NatsSettings(), url, "test")
    checked_broker(NatsSettings(allow_plaintext=True), url, "test")
    assert caplog.records == []


def test_a_relay_is_refused_as_a_router_is() -> None:
    nats = NatsSettings(url="nats://nats:4222")
    worker = EngineSettings(id="a", engine="vllm", address="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"nats\.allow_plaintext"):
        RelayApp(RelayConfig(nats=nats, workers=(worker,)))


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_server_that_offers_no_tls_gets_no_credentials(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BROKEN_S", 0.005)
    came: list[bytes] = []
    attempts = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload":1048576}\r\n')
        try:
            came.append(await reader.read())
        except ConnectionError:
            came.append(b"")
        writer.transport.abort()
        attempts.release()

    authority = Authority()
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    settings = NatsSettings(user="u", password="hush", tls_ca_file=str(tmp_path / "ca.crt"))
    async with tcp_server(serve) as port, asyncio.timeout(GUARD_S):
        broker = Broker(settings, f"{scheme}://127.0.0.1:{port}", "test")
        connecting = asyncio.create_task(broker.connect())
        for _attempt in range(2):
            await attempts.acquire()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await broker.close()
    assert set(came) == {b""}
    assert broker.counts["error"] >= 1


@pytest.mark.parametrize("optional", [False, True], ids=["required", "available"])
async def test_a_server_with_tls_is_connected_to_over_it(optional: bool, tmp_path: Path) -> None:
    authority = Authority()
    files = written(tmp_path, authority.issue(), authority)
    files_of_server = f"cert_file: '{files.certificate_file}', key_file: '{files.key_file}'"
    config = f"debug: true\ntls {{{files_of_server}}}\n"
    if optional:
        config += "allow_non_tls: true\n"
    async with nats_server(tmp_path, config) as server, asyncio.timeout(GUARD_S):
        settings = NatsSettings(tls_ca_file=files.client_ca_file)
        broker = Broker(settings, server.url.replace("tls://", "nats://"), "test")
        try:
            await broker.connect()
            assert "TLS handshake complete" in server.log()
        finally:
            await broker.close()


async def test_the_end_of_a_server_with_tls_is_one_line_in_the_log_and_no_warning_of_asyncio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    files = written(tmp_path, authority.issue(), authority)
    config = f"tls {{cert_file: '{files.certificate_file}', key_file: '{files.key_file}'}}\n"
    async with asyncio.timeout(GUARD_S):
        async with nats_server(tmp_path, config) as server:
            settings = NatsSettings(tls_ca_file=files.client_ca_file)
            broker = Broker(settings, server.url.replace("tls://", "nats://"), "test")
            await broker.connect()
        await until(lambda: not broker.connected, "the end is noticed")
        await broker.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]
