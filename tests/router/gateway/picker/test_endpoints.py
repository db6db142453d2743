"""Workers by the endpoint that gateways know them by."""

import asyncio
import socket
from dataclasses import dataclass
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


@dataclass
class Names:
    """A name server, and the picker's clock."""

    answers: list[str | None]
    now_s: float = 0.0
    calls: int = 0

    async def resolved(self, host: str, port: int, **_: Any) -> list[Any]:
        self.calls += 1
        if (answer := self.answers.pop(0)) is None:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, port))]

    def known(self, monkeypatch: pytest.MonkeyPatch, *listed: str) -> Endpoints:
        """Endpoints that are resolved here, of a fleet with workers at these addresses."""
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.resolved)
        known = made()
        known._roster.use([worker(each, each) for each in listed])
        monkeypatch.setattr(known, "_clock", lambda: self.now_s)
        return known


async def test_names_are_resolved_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(["10.0.0.1", "10.0.0.2", None, "10.0.0.3"])
    known = names.known(monkeypatch, "http://pod:1", "http://10.0.0.9:1", "no address:x")
    assert await known.of("http://pod:1") == "10.0.0.1:1"
    expected = [(29.0, "10.0.0.1:1"), (31.0, "10.0.0.2:1")]
    # The name's server is away: the old address stays, and is looked up again in the next round.
    expected += [(99.0, "10.0.0.2:1"), (100.0, "10.0.0.3:1"), (101.0, "10.0.0.3:1")]
    for names.now_s, endpoint in expected:
        await known.look_up()
        assert await known.of("http://pod:1") == endpoint
    assert names.calls == 4


async def test_no_pick_and_no_list_waits_for_a_name_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(["10.0.0.1", *[None] * 5])
    known = names.known(monkeypatch, "http://pod:1", "http://late:1")
    assert [await known.of(f"http://{host}:1") for host in ("pod", "late")] == ["10.0.0.1:1", ""]
    names.now_s = 1000.0
    for _ in range(3):
        await known.use(known._roster.workers)
        assert [await known.of(f"http://{host}:1") for host in ("pod", "late")] == [
            "10.0.0.1:1",
            "",
        ]
    assert names.calls == 2
    await known.look_up()
    assert names.calls == 4
    await known.look_up()
    assert [each.args[0] for each in caplog.records if each.args] == ["late", "pod"]


async def test_a_name_that_comes_back_with_another_address_has_that_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(["10.0.0.1", "10.0.0.9", "10.0.0.10"])
    known = names.known(monkeypatch, "http://pod:1")
    await known.use(known._roster.workers)
    await known.use([])
    await known.use(known._roster.workers)
    assert known.worker_at("10.0.0.9:1") == "http://pod:1"
    names.now_s = 31.0
    await known.look_up()
    assert known.worker_at("10.0.0.10:1") == "http://pod:1"
    assert known.worker_at("10.0.0.9:1") is None


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
