"""NATS settings that can never connect are refused at the start, in a sentence without secrets."""

from pathlib import Path

import nkeys
import pytest

from events.plane.broker import Broker
from events.plane.nats_check import files_of
from events.plane.nats_client import NatsClient
from events.plane.settings import NatsSettings

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
CREDENTIALS = (
    b"""-----BEGIN NATS USER JWT-----
e30.e30.c2ln
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
%s
------END USER NKEY SEED------
"""
    % SEED
)


@pytest.mark.parametrize(
    "url",
    [
        "nats://h",
        "nats://h:",
        "nats://h:4222/",
        "tls://h:65535",
        "nats://[::1]:4222",
        "nats://user:p,w%zz@h:1",
        "wss://h/path",
    ],
)
def test_a_url_that_may_lead_to_a_server_is_taken(url: str) -> None:
    Broker(NatsSettings(allow_plaintext=True), url, "test").check()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("h:4222", "begins with nats://"),
        ("http://h:1", "begins with nats://"),
        ("nats://h:99999", "no number from 1 to 65535"),
        ("nats://h:0", "no number from 1 to 65535"),
        ("nats://h:abc", "no number from 1 to 65535"),
        ("nats://fe80::1", "no number from 1 to 65535"),
        ("nats://[::1", "a bracket without an IPv6 address"),
        ("nats://", "names no host"),
        ("nats://:4222", "names no host"),
        ("nats://a b:1", "a space"),
        ("nats://h:1,g:2", "names several servers"),
        ("nats://u:hunter2@h:1,nats://u:hunter2@g:2", "names several servers"),
        ("nats://u:hunter2@h:x", "no number from 1 to 65535"),
        ("nats://u:hunter2@[::1", "a bracket without an IPv6 address"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_without_its_password(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        Broker(NatsSettings(), url, "test").check()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("good", "is_seed", "bad"),
    [
        (SEED + b"\n", True, (b"", b"hunter2", b"\xff\xfe", SEED[:20])),
        (
            CREDENTIALS,
            False,
            (b"", b"hunter2", CREDENTIALS.partition(b"-----BEGIN USER")[0], CREDENTIALS[:40]),
        ),
    ],
)
def test_a_file_without_a_key_is_refused(
    tmp_path: Path, good: bytes, is_seed: bool, bad: tuple[bytes, ...]
) -> None:
    file = tmp_path / "secret"
    settings = NatsSettings(credentials_file=str(file))
    broker = Broker(settings, "tls://h:1", "test")
    file.write_bytes(good)
    broker.check()
    assert files_of(settings) == ((None, str(file)) if is_seed else (str(file), None))
    for content in bad:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="secret") as caught:
            broker.check()
        assert "hunter2" not in str(caught.value)


def test_a_credentials_file_that_is_emptied_fails_an_attempt_to_connect(tmp_path: Path) -> None:
    """nats-py would read on for ever, and hold up all else on the event loop."""
    file = tmp_path / "secret"
    client = NatsClient()
    file.write_bytes(CREDENTIALS)
    assert client._read_creds_user_jwt(str(file)) == b"e30.e30.c2ln"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="no NATS credentials file"):
        client._read_creds_user_jwt(str(file))
