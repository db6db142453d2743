"""How a process calls a router: files of credentials that change while calls go on."""

import asyncio
from pathlib import Path

import pytest

from kvroute.client import KvRouteClient
from router.config.settings.keys_settings import DialSettings
from router.net.keys.certificates import Certificates
from router.net.keys.dialing import credential_files, dial_options
from router.net.keys.door import Door
from router.net.keys.followed import FOLLOW_S
from tests.stage.certificates import Authority, written
from tests.stage.keys import RIGHTS, identity, write_keys
from tests.stage.loopback import TurnedClock
from tests.stage.served import served
from tests.stage.waiting import until


def client_files(folder: Path, authority: Authority, name: str) -> DialSettings:
    """Writes a client's files, and the settings that name them."""
    certificate, key = authority.issue(name, hosts=())
    for file, content in (("ca", authority.pem), ("crt", certificate), ("key", key)):
        (folder / f"client.{file}").write_bytes(content)
    return DialSettings(
        ca_file=str(folder / "client.ca"),
        certificate_file=str(folder / "client.crt"),
        key_file=str(folder / "client.key"),
    )


async def test_a_changed_certificate_is_shown_without_a_failed_call(tmp_path: Path) -> None:
    authority, clock = Authority(), TurnedClock()
    certificates = Certificates(written(tmp_path, authority.issue(), authority))
    entries = (
        identity("old", tokens=[], certificates=["cn:old"]),
        identity("new", rights=(*RIGHTS, "report_any"), tokens=[], certificates=["cn:new"]),
    )
    door = Door(write_keys(tmp_path, *entries), clock=clock)
    async with served("w0", door=door, certificates=certificates) as stage:
        settings = client_files(tmp_path, authority, "old")
        options = dial_options(settings, clock)
        async with KvRouteClient(f"127.0.0.1:{stage.server.port}", **options) as client:
            await client.drain_worker("w0")
            await client.undrain_worker("w0")
            open_requests = [client.request(token_ids=list(range(100))) for _ in range(4)]
            for request in open_requests:
                await request.__aenter__()
            client_files(tmp_path, authority, "new")
            await client.drain_worker("w0")
            clock.ahead_s += FOLLOW_S
            await client.undrain_worker("w0")
            assert [control.by for control in stage.sent] == ["old", "old", "old", "new"]
            await asyncio.gather(*(one.__aexit__(None, None, None) for one in open_requests))
            transport = client._picker._transport  # type: ignore[attr-defined]
            await until(lambda: len(transport.lines.all()) == 1, "the old connection is closed")


def test_half_a_rotation_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, clock = Authority(), TurnedClock()
    files = credential_files(client_files(tmp_path, authority, "old"), clock)
    before = files()
    certificate, key = authority.issue("new", hosts=())
    (tmp_path / "client.crt").write_bytes(certificate)
    assert files() is before
    clock.ahead_s += FOLLOW_S
    assert files() is before, "the key is another's"
    assert "not read again" in caplog.text
    (tmp_path / "client.key").write_bytes(key)
    clock.ahead_s += FOLLOW_S
    after = files()
    assert after is not before
    clock.ahead_s += FOLLOW_S
    assert files() is after
