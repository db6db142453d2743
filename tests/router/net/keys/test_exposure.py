"""Which addresses may be served without keys."""

import pytest

from router.config.keys import ConfigError
from router.net.keys.exposure import check_exposure, is_private


@pytest.mark.parametrize(
    "listen",
    [
        "127.0.0.1:50051",
        "127.8.9.10:1",
        "[::1]:50051",
        "localhost:0",
        "unix:/run/kvroute/grpc",
        "unix-abstract:kvroute",
        "ipv4:127.0.0.1:1",
        "dns:///localhost:1",
    ],
)
def test_loopback_and_unix_sockets_are_private(listen: str) -> None:
    assert is_private(listen)


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:50051",
        "[::]:50051",
        ":50051",
        "10.0.0.1:50051",
        "router.example:50051",
        "localhost.example:1",
        "[::ffff:10.0.0.1]:1",
        "dns:///router:1",
        "127.0.0.1",
        "",
    ],
)
def test_every_other_address_is_not_private(listen: str) -> None:
    assert not is_private(listen)


def test_a_refusal_names_the_one_switch_and_the_key() -> None:
    with pytest.raises(ConfigError) as refused:
        _check("[::]:1")
    sentence = str(refused.value)
    assert "or grpc.any_address to serve all that reach it" in sentence
    assert "$.grpc.listen" in sentence


def test_keys_or_the_switch_open_an_address() -> None:
    assert _check("[::]:1", guarded=True) is False
    assert _check("[::]:1", allowed=True) is True  # which is to be logged
    assert _check("[::1]:1", allowed=True) is False


def _check(listen: str, *, guarded: bool = False, allowed: bool = False) -> bool:
    return check_exposure(
        listen, key="grpc.listen", guarded=guarded, switch="grpc.any_address", allowed=allowed
    )
