"""Workers by the endpoint that gateways know them by."""

import asyncio
import socket
from typing import Any

import pytest

from kvroute.client import KvRouteClient
from kvroute.v1 import WorkerStatus
from router.gateway.picker import endpoints as module
from router.gateway.picker.endpoints import Endpoints
from router.gateway.server.roster import Roster


def made() -> Endpoints:
    return Endpoints(Roster(KvRouteClient("127.0.0.1:1"), lambda: 0.0))


def worker(worker_id: str, address: str, *, running: int = 0, able: bool = True) -> WorkerStatus:
    return WorkerStatus(worker_id=worker_id, address=address, running=running, schedulable=able)


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("http://10.0.0.3:8000", "10.0.0.3:8000"),
        ("http://10.0.0.3:8000/", "10.0.0.3:8000"),
        ("10.0.0.3:8000", "10.0.0.3:8000"),
        ("http://10.0.0.3", "10.0.0.3:80"),
        ("https://10.0.0.3", "10.0.0.3:443"),
        ("http://[fd00::3]:8000", "[fd00::3]:8000"),
        ("http://localhost:8000", "127.0.0.1:8000"),
        ("http://", ""),
        ("http://[::x]:1", ""),
        ("http://10.0.0.3:99999", ""),
        ("", ""),
    ],
)
async def test_addresses_become_endpoints(
    address: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolved(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "localhost"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    assert await made().of(address) == endpoint


async def test_names_are_resolved_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    answers = iter(["10.0.0.1", "10.0.0.2", None])
    now_s = [0.0]

    async def resolved(host: str, port: int, **_: Any) -> list[Any]:
        calls.append(host)
        if (answer := next(answers)) is None:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    known = made()
    monkeypatch.setattr(known, "_clock", lambda: now_s[0])
    for now_s[0], endpoint in ((0.0, "10.0.0.1:1"), (29.0, "10.0.0.1:1"), (31.0, "10.0.0.2:1")):
        assert await known.of("http://pod:1") == endpoint
    now_s[0] = 99.0  # the name's server is away: the old address stays
    assert await known.of("http://pod:1") == "10.0.0.2:1"
    assert calls == ["pod"] * 3


@pytest.mark.parametrize("host", ["worker..local", "a" * 64])
async def test_a_name_that_can_be_no_hosts_has_no_endpoint(host: str) -> None:
    known = made()
    await known.use([worker("a", f"grpc://{host}:9000"), worker("b", "http://10.0.0.2:1")])
    assert known.worker_at("10.0.0.2:1") == "b"
    assert await known.of(f"grpc://{host}:9000") == ""


async def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    monkeypatch.setattr(module, "NAMES_MAX", 3)
    known = made()
    for number in range(10):
        await known.of(f"http://pod-{number}:1")
    assert len(known._addresses) == 3


async def test_the_least_loaded_endpoint_goes_first_and_counts() -> None:
    known = made()
    await known.use(
        [
            worker("a", "http://10.0.0.1:1", running=2),
            worker("b", "http://10.0.0.2:1"),
            worker("c", "http://10.0.0.3:1", able=False),
        ]
    )
    picks = [known.least_loaded(None) for _ in range(4)]
    assert picks == ["10.0.0.2:1", "10.0.0.2:1", "10.0.0.1:1", "10.0.0.2:1"]
    assert known.least_loaded(frozenset({"10.0.0.3:1"})) == ""
    assert known.least_loaded(frozenset({"10.0.0.1"})) == "10.0.0.1:1"


async def test_ranks_behind_one_port_are_one_endpoint() -> None:
    known = made()
    await known.use([worker("a", "http://10.0.0.1:1"), worker("a-1", "http://10.0.0.1:1")])
    assert known.among(frozenset({"10.0.0.1:1"})) == ("a", "a-1")
    assert known.worker_at("10.0.0.1:1") == "a"
    assert known.worker_at("10.0.0.9:1") is None
