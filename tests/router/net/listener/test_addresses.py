"""Addresses to listen on, on hosts of one family or both, and clients' names."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.net.listener.addresses import client_of, listening, listening_unix, unmapped


async def addresses_of(host: str, **about: Any) -> list[str]:
    """What a host is on this machine, on port 0."""
    sockets = await listening(host, 0, **about)
    names = [each.getsockname() for each in sockets]
    for each in sockets:
        each.close()
    assert len({name[1] for name in names}) == 1, "one port for all"
    return sorted(name[0] for name in names)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to."""
    known: dict[str, list[str]] = {}

    async def getaddrinfo(_loop: Any, host: str, port: int, **_about: Any) -> list[Any]:
        infos: list[Any] = []
        for address in known.get(host, [host]):
            if ":" in address:
                infos.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0)))
            else:
                infos.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)))
        return infos

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return known


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the host lack a family, whose sockets can't be made or whose addresses can't be bound."""

    def lack(*families: int, at_bind: bool) -> None:
        class Lacking(socket.socket):
            def __init__(self, own: int = -1, *more: Any, **about: Any) -> None:
                if own in families and not at_bind:
                    raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
                super().__init__(own, *more, **about)

            def bind(self, address: Any) -> None:
                if self.family in families:
                    raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
                super().bind(address)

        monkeypatch.setattr(socket, "socket", Lacking)

    return lack


@pytest.mark.parametrize("host", ["::", "", "0::0", "0:0:0:0:0:0:0:0"])
async def test_every_address_is_one_socket_of_both_families(host: str) -> None:
    (made,) = await listening(host, 0)
    with made:
        assert made.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0
        assert await addresses_of(host) == ["::"]


@pytest.mark.parametrize("at_bind", [False, True])
async def test_every_address_of_a_host_without_ipv6_is_of_ipv4(without: Any, at_bind: bool) -> None:
    without(socket.AF_INET6, at_bind=at_bind)
    assert await addresses_of("::") == ["0.0.0.0"]


async def test_an_address_is_that_address() -> None:
    assert await addresses_of("0.0.0.0") == ["0.0.0.0"]
    assert await addresses_of("127.0.0.2") == ["127.0.0.2"]
    assert await addresses_of("::1", reuse_port=True) == ["::1"]


async def test_a_name_is_each_of_its_addresses_on_one_port(names: dict[str, list[str]]) -> None:
    names["here"] = ["::1", "127.0.0.1", "127.0.0.2", "127.0.0.1"]
    assert await addresses_of("here") == ["127.0.0.1", "127.0.0.2", "::1"]


@pytest.mark.parametrize("order", [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
@pytest.mark.parametrize("lacks", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("at_bind", [False, True])
async def test_an_address_of_a_name_that_the_host_does_not_have_is_left_out(
    names: dict[str, list[str]], without: Any, order: Collection[str], lacks: int, at_bind: bool
) -> None:
    names["here"] = list(order)
    without(lacks, at_bind=at_bind)
    assert await addresses_of("here") == ["::1" if lacks == socket.AF_INET else "127.0.0.1"]


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "there", "::"])
@pytest.mark.parametrize("at_bind", [False, True])
async def test_what_is_of_no_address_here_is_refused(
    names: dict[str, list[str]], without: Any, host: str, at_bind: bool
) -> None:
    names["there"] = ["::1", "127.0.0.1"]
    without(socket.AF_INET, socket.AF_INET6, at_bind=at_bind)
    with pytest.raises(OSError, match=r"not supported|assign"):
        await listening(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "::1", "both"])
async def test_a_port_that_is_taken_is_refused_and_nothing_stays_open(
    names: dict[str, list[str]], host: str
) -> None:
    names["both"] = ["::1", "127.0.0.1"]
    taken = await listening("::" if ":" in host else "127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="in use"):
            await listening(host, taken[0].getsockname()[1])
    finally:
        taken[0].close()


@given(st.integers(0, (1 << 32) - 1))
def test_an_ipv4_client_is_its_address_in_either_form(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    assert client_of(str(address)) == client_of(f"::ffff:{address}") == str(address)
    assert unmapped(f"::ffff:{address}") == unmapped(str(address)) == str(address)


@given(st.integers(1, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_an_ipv6_client_is_its_64(network: int, one: int, other: int) -> None:
    first, second = (str(ipaddress.IPv6Address(network << 64 | host)) for host in (one, other))
    assert client_of(first) == client_of(f"{second}%eth0")
    assert ipaddress.IPv6Address(first) in ipaddress.ip_network(client_of(first))
    assert unmapped(first) == first
    neighbour = str(ipaddress.IPv6Address((network ^ 1) << 64 | one))
    if network != 1:
        assert client_of(neighbour) != client_of(first)


def test_a_unix_socket_has_its_permissions(tmp_path: Path) -> None:
    with listening_unix(tmp_path / "s", 0o620):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o620


def test_a_unix_socket_takes_the_place_of_one_that_a_process_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listening_unix(path, 0o600).close()
    with listening_unix(path, 0o600), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_unix_socket_takes_the_place_of_no_other_server_and_no_file(tmp_path: Path) -> None:
    path, file = tmp_path / "s", tmp_path / "file"
    file.write_text("kept")
    with listening_unix(path, 0o600):
        for taken in (path, file):
            with pytest.raises(OSError, match="in use"):
                listening_unix(taken, 0o600)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert file.read_text() == "kept"
