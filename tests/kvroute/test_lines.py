"""Several routers: which one a call goes to, whose a reservation is, and addresses that change."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvroute.client import (
    ClientClosed,
    KvRouteClient,
    KvRouteError,
    RetryPolicy,
    RouterUnreachable,
)
from kvroute.client.connections import lines as lines_module
from kvroute.client.connections.channel import Address, Target, addresses_of
from kvroute.client.connections.line import ConnectionOptions, Line
from kvroute.client.connections.lines import LINES_MAX, OWNERS_MAX, RESOLVE_S, RETIRED_MAX, Lines
from kvroute.v1 import Progress, ProgressResult, Receipt, add_RouterServicer_to_server
from tests.kvroute.scripted_router import GUARD_S, Clock, Router, Server, pick_of, status, until

Code = grpc.StatusCode
TOKENS = [1, 2, 3]
ONCE = RetryPolicy(attempts=1)
TLS = Path(__file__).parent / "tls"


class Names:
    """DNS, as the test wants it; every name is the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.lookups = 0
        monkeypatch.setattr(lines_module, "addresses_of", self.look_up)

    async def look_up(self, target: Target) -> list[Address]:
        self.lookups += 1
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [Address(address, target.text) for address in self.addresses]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
async def servers() -> AsyncIterator[list[Server]]:
    """Three routers with names of their own."""
    servers = [Server() for _ in range(3)]
    for i, server in enumerate(servers):
        await server.start("127.0.0.1:0")
        server.router.answer = pick_of(
            f"w{i}", name=f"replica-{i}-1", receipt=Receipt(replica=f"r-replica-{i}")
        )
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
def silent_addresses() -> Iterator[list[str]]:
    """Two addresses that take connections and say nothing on them."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in (one, two)]


async def all_connected(client: KvRouteClient, count: int) -> None:
    """Waits until a client has so many lines, all of them up."""
    await client.route(token_ids=TOKENS)
    lines = client._transport.open()
    async with asyncio.timeout(GUARD_S):
        while len(lines._lines) < count:  # noqa: ASYNC110  # a lookup sets no event here
            await asyncio.sleep(0.002)
        for line in lines._lines:
            assert await line.settled()


def make_client(targets: Any, **settings: Any) -> tuple[KvRouteClient, Clock]:
    """These tests count calls by router: the fallback's list of workers would be one more."""
    clock = Clock()
    settings.setdefault("fallback", False)
    return KvRouteClient(targets, clock=clock, sleep=clock.sleep, **settings), clock


def addresses(servers: list[Server]) -> list[str]:
    return [server.address for server in servers]


def asked(servers: list[Server]) -> list[int]:
    return [len(server.router.asked) for server in servers]


def finished(*reservations: str) -> list[Progress]:
    return [Progress(reservation_id=one, state=3) for one in reservations]  # type: ignore[arg-type]


# Which router


@pytest.mark.parametrize("batching", [True, False])
async def test_routers_take_turns(servers: list[Server], batching: bool) -> None:
    client, _ = make_client(addresses(servers), batching=batching)
    async with client:
        await all_connected(client, 3)
        before = asked(servers)
        for _ in range(30):
            await client.route(token_ids=TOKENS)
        assert [now - then for now, then in zip(asked(servers), before, strict=True)] == [10] * 3


async def test_a_router_that_is_slow_gets_less(servers: list[Server]) -> None:
    client, _ = make_client(addresses(servers))
    async with client:
        await all_connected(client, 3)
        servers[0].router.routes.clear()
        before = asked(servers)
        held: list[asyncio.Task[Any]] = []
        async with asyncio.timeout(GUARD_S):
            for _ in range(30):
                call = asyncio.create_task(client.route(token_ids=TOKENS))
                while not call.done() and asked(servers)[0] - before[0] == len(held):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)  # the slow router sends no signal
                held += [] if call.done() else [call]
        taken = [now - then for now, then in zip(asked(servers), before, strict=True)]
        assert taken[0] <= 1
        assert sum(taken) == 30
        servers[0].router.routes.set()
        await asyncio.gather(*held)


async def test_a_router_that_is_gone_is_passed_over_at_once_and_taken_back(
    servers: list[Server],
) -> None:
    client, clock = make_client(addresses(servers))
    async with client:
        await all_connected(client, 3)
        await servers[0].stop()
        picks = [await client.route(token_ids=TOKENS) for _ in range(12)]
        assert {pick.worker_id for pick in picks} == {"w1", "w2"}
        assert all(waited_s == 0.0 for waited_s in clock.slept_s), "others were there to be asked"
        await servers[0].start()
        async with asyncio.timeout(GUARD_S):
            while (await client.route(token_ids=TOKENS)).worker_id != "w0":
                clock.now_s += 1.0


async def test_a_router_that_cannot_be_reached_first_of_all_delays_no_call(
    servers: list[Server],
) -> None:
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        for targets in ([nobody, servers[1].address], [servers[1].address, nobody]):
            client, clock = make_client(targets, retry=ONCE)
            async with client:
                for _ in range(4):
                    assert (await client.route(token_ids=TOKENS)).worker_id == "w1"
            assert clock.slept_s == []


async def test_no_router_at_all_is_unreachable_after_all_attempts(servers: list[Server]) -> None:
    client, clock = make_client(addresses(servers))
    for server in servers:
        await server.stop()
    async with client:
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)
    assert len(clock.slept_s) == RetryPolicy().attempts - 1


async def test_a_router_that_answers_unavailable_is_not_passed_over(servers: list[Server]) -> None:
    client, _ = make_client(addresses(servers), batching=False)
    async with client:
        await all_connected(client, 3)
        before = asked(servers)
        for server in servers:
            server.router.refusals.append(status(Code.UNAVAILABLE, "NO_WORKER"))
        await client.route(token_ids=TOKENS)
        taken = [now - then for now, then in zip(asked(servers), before, strict=True)]
        assert sorted(taken) == [1, 1, 2]


# Whose a reservation is


async def test_a_report_goes_to_the_router_that_made_the_reservation(
    servers: list[Server],
) -> None:
    standing = Clock(at_once=False)  # so that no lease is ever renewed
    client = KvRouteClient(addresses(servers), clock=standing, sleep=standing.sleep)
    async with client:
        await all_connected(client, 3)
        for _ in range(9):
            async with client.request(token_ids=TOKENS) as request:
                owner = int(request.pick.worker_id[1:])
                await request.prefill_done()
            for _ in range(2):
                told = servers[owner].router.told.get_nowait()
                assert told.reservation_id == f"r-replica-{owner}-1"
    assert all(server.router.told.empty() for server in servers)


async def test_steps_of_several_routers_go_to_each_and_come_back_in_order(
    servers: list[Server],
) -> None:
    unchanged = ProgressResult.PROGRESS_RESULT_UNCHANGED
    client, _ = make_client(addresses(servers))
    async with client:
        await all_connected(client, 3)
        for _ in range(3):
            await client.route(token_ids=TOKENS)
        servers[2].router.report_results.append(unchanged)
        names = [f"r-replica-{i}-{n}" for n, i in enumerate([0, 2, 0, 1])]
        outcomes = await client.report(*finished(*names))
        assert [one.reservation_id for one in outcomes] == names
        assert [one.result == unchanged for one in outcomes] == [False, True, False, False]
        assert [server.router.told.qsize() for server in servers] == [2, 1, 1]


async def test_if_one_router_of_several_hears_no_report_that_raises(servers: list[Server]) -> None:
    client, _ = make_client(addresses(servers), retry=ONCE)
    async with client:
        await all_connected(client, 3)
        for _ in range(3):
            await client.route(token_ids=TOKENS)
        await servers[1].stop()
        with pytest.raises(RouterUnreachable):
            await client.report(*finished("r-replica-0-1", "r-replica-1-1"))
        assert servers[0].router.told.qsize() == 1
        assert servers[2].router.told.qsize() == 0, "nobody else could do anything with it"


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("routers", [1, 2])
async def test_a_router_that_gives_too_few_outcomes_is_an_error_of_the_call(
    servers: list[Server], batching: bool, routers: int
) -> None:
    client, _ = make_client(addresses(servers[:routers]), batching=batching, retry=ONCE)
    async with client:
        await all_connected(client, routers)
        for _ in range(routers):
            await client.route(token_ids=TOKENS)
        servers[0].router.outcomes_max = 1
        names = ["r-replica-0-1", "r-replica-0-2", *["r-replica-1-1"] * (routers - 1)]
        with pytest.raises(KvRouteError, match="1 outcomes for 2 steps"):
            await client.report(*finished(*names))


async def test_what_is_told_of_a_router_that_is_gone_goes_to_another_at_once(
    servers: list[Server],
) -> None:
    client, clock = make_client(addresses(servers))
    async with client:
        await all_connected(client, 3)
        picks = [await client.route(token_ids=TOKENS) for _ in range(3)]
        clock.slept_s.clear()
        await servers[1].stop()
        (gone,) = (one.reservation_id for one in picks if one.worker_id == "w1")
        for _ in range(2):
            (outcome,) = await client.report(*finished(gone))
            assert outcome.reservation_id == gone
        assert sum(server.router.told.qsize() for server in (servers[0], servers[2])) == 2
        assert not any(clock.slept_s)


async def test_a_report_of_an_unknown_router_goes_to_any(servers: list[Server]) -> None:
    client, _ = make_client(addresses(servers))
    async with client:
        (outcome,) = await client.report(*finished("elsewhere-1"))
        assert outcome.reservation_id == "elsewhere-1"
        assert await client.report() == []


# Addresses that change


async def test_a_name_stands_for_all_its_addresses(servers: list[Server], dns: Names) -> None:
    dns.addresses = addresses(servers)
    client, _ = make_client("routers:50051")
    async with client:
        await all_connected(client, 3)
        picks = [await client.route(token_ids=TOKENS) for _ in range(6)]
    assert {pick.worker_id for pick in picks} == {"w0", "w1", "w2"}
    assert client.counts["lines"] == 3
    assert dns.lookups == 1


async def test_a_wait_for_a_router_is_part_of_the_time_of_its_call(
    servers: list[Server], dns: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    dns.addresses = addresses(servers[:1])
    client, clock = make_client("router.local:80")

    async def slow(target: Target) -> list[Address]:
        clock.now_s += 80.0
        return await dns.look_up(target)

    monkeypatch.setattr(lines_module, "addresses_of", slow)
    async with client:
        await client.route(token_ids=TOKENS, timeout_s=100.0)
    assert servers[0].router.left_s[0] <= 21.0  # gRPC sends it rounded


async def test_a_new_address_is_found_and_an_old_one_keeps_its_reservations(
    servers: list[Server], dns: Names
) -> None:
    dns.addresses = addresses(servers[:1])
    client, clock = make_client("routers:50051")
    async with client:
        await all_connected(client, 1)
        dns.addresses = addresses(servers[1:])
        clock.now_s += RESOLVE_S
        await all_connected(client, 2)
        picks = [await client.route(token_ids=TOKENS) for _ in range(6)]
        assert {pick.worker_id for pick in picks} == {"w1", "w2"}
        await client.report(*finished("r-replica-0-1"))
        assert servers[0].router.told.qsize() == 1
        # Once it is really gone, nobody waits for it any more.
        await servers[0].stop()
        (old,) = client._transport.open()._retired
        await until(lambda: not old.connected(connect=False))
        clock.now_s += RESOLVE_S
        await client.route(token_ids=TOKENS)
        await until(lambda: not client._transport.open()._retired)
        await client.report(*finished("r-replica-0-1"))
        assert sum(server.router.told.qsize() for server in servers[1:]) == 1


async def test_an_address_that_comes_back_has_its_line_back(
    servers: list[Server], dns: Names
) -> None:
    dns.addresses = addresses(servers)
    client, clock = make_client("routers:50051")
    async with client:
        await all_connected(client, 3)
        lines = client._transport.open()
        first = set(lines._lines)
        for gone in (True, False):
            dns.addresses = addresses(servers[1:] if gone else servers)
            clock.now_s += RESOLVE_S
            await client.route(token_ids=TOKENS)
            await until(lambda gone=gone: len(lines._lines) == 3 - gone)  # type: ignore[misc]
        assert set(lines._lines) == first
        assert lines._retired == []


async def test_a_failed_call_looks_the_name_up_before_its_time(
    servers: list[Server], dns: Names
) -> None:
    dns.addresses = addresses(servers[:1])
    client, clock = make_client("routers:50051")
    async with client:
        await all_connected(client, 1)
        await servers[0].stop()
        dns.addresses = addresses(servers[1:2])
        clock.now_s += 1.0
        assert (await client.route(token_ids=TOKENS)).worker_id == "w1"
    assert dns.lookups == 2


async def test_failures_look_a_name_up_once_a_second_at_most(dns: Names) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dns.addresses = [f"127.0.0.1:{taken.getsockname()[1]}"]
        client, _ = make_client("routers:50051", retry=ONCE)
        async with client:
            for _ in range(10):
                with pytest.raises(RouterUnreachable):
                    await client.route(token_ids=TOKENS)
    assert dns.lookups == 1


async def test_a_name_without_addresses_is_unreachable_and_tried_again(
    servers: list[Server], dns: Names
) -> None:
    client, clock = make_client("routers:50051")

    async def appear() -> None:
        dns.addresses = addresses(servers[:1])

    async with client:
        with pytest.raises(RouterUnreachable, match="routers:50051 can't be resolved: Name or"):
            await client.route(token_ids=TOKENS)
        assert len(clock.slept_s) == RetryPolicy().attempts - 1
        clock.before_waking = appear
        assert (await client.route(token_ids=TOKENS)).worker_id == "w0"
        assert client.counts["lookups_failed"] == RetryPolicy().attempts + 1


async def test_a_name_that_is_gone_for_a_moment_changes_nothing(
    servers: list[Server], dns: Names, caplog: pytest.LogCaptureFixture
) -> None:
    dns.addresses = addresses(servers)
    client, clock = make_client(["routers:50051", "more:50051"])
    async with client:
        await all_connected(client, 3)
        dns.addresses = []
        clock.now_s += RESOLVE_S
        await client.route(token_ids=TOKENS)
        await until(lambda: client.counts["lookups_failed"] == 2)
        await until(lambda: "known addresses stay in use" in caplog.text)
        assert len(client._transport.open()._lines) == 3
        await client.route(token_ids=TOKENS)


async def waiting_for(client: KvRouteClient, count: int) -> asyncio.Task[Any]:
    """A call that waits for one of several routers, none of which connects."""
    call = asyncio.create_task(client.route(token_ids=TOKENS))
    await until(lambda: client._transport.lines is not None)
    lines = client._transport.open()
    await until(lambda: len(lines._lines) == count and not any(map(is_idle, lines._lines)))
    return call


def is_idle(line: Line) -> bool:
    return line.channel.get_state() is grpc.ChannelConnectivity.IDLE


async def test_a_call_that_waits_for_a_router_ends_with_its_client(
    silent_addresses: list[str],
) -> None:
    client, _ = make_client(silent_addresses)
    call = await waiting_for(client, 2)
    await client.close()
    with pytest.raises(ClientClosed):
        await call


async def test_a_call_that_waits_for_routers_that_are_replaced_goes_to_others(
    silent_addresses: list[str], servers: list[Server], dns: Names
) -> None:
    dns.addresses = silent_addresses
    client, _ = make_client("router.local:80")
    async with client:
        call = await waiting_for(client, 2)
        dns.addresses = addresses(servers[:1])
        await client._transport.open()._look_up()
        assert (await call).worker_id == "w0"


async def test_closing_ends_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_target: Target) -> list[Address]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(lines_module, "addresses_of", never)
    client, _ = make_client("routers:50051")
    call = asyncio.create_task(client.route(token_ids=TOKENS))
    await until(
        lambda: client._transport.lines is not None and client._transport.lines._lookup is not None
    )
    await client.close()
    with pytest.raises(ClientClosed):
        await call
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_real_name_is_looked_up() -> None:
    found = await addresses_of(Target("localhost:50051", "localhost", "50051"))
    assert Address("127.0.0.1:50051", "localhost:50051") in found or (
        Address("[::1]:50051", "localhost:50051") in found
    )
    assert len(set(found)) == len(found)
    assert await addresses_of(Target("unix:s")) == [Address("unix:s")]


async def test_a_certificate_is_checked_against_the_name_and_not_the_address(
    dns: Names,
) -> None:
    certificate, key = (TLS / "certificate.pem").read_bytes(), (TLS / "key.pem").read_bytes()
    server = grpc.aio.server()
    add_RouterServicer_to_server(Router(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    dns.addresses = [f"127.0.0.1:{port}"]
    trusted = grpc.ssl_channel_credentials(certificate)
    async with KvRouteClient("router.test:50051", credentials=trusted) as client:
        assert (await client.route(token_ids=TOKENS)).worker_id == "w0"
    wrong, _ = make_client("other.test:50051", credentials=trusted, retry=ONCE)
    async with wrong:
        with pytest.raises(RouterUnreachable):
            await wrong.route(token_ids=TOKENS)
    await server.stop(None)


# Bounds


def make_lines(targets: list[str]) -> Lines:
    options = ConnectionOptions(batching=False, clock=Clock(), rng=random.Random(1))
    named = [Target(f"{text}:1", text, "1") for text in targets]
    return Lines(named, options, Counter(), lambda _: None)


async def test_of_many_addresses_a_few_are_used_and_kept(dns: Names) -> None:
    dns.addresses = [f"127.0.0.1:{port}" for port in range(1, 101)]
    lines = make_lines(["routers"])
    await lines._look_up()
    first = {line.address.target for line in lines._lines}
    assert len(first) == LINES_MAX
    assert first != set(dns.addresses[:LINES_MAX]), "not every client takes the same ones"
    dns.addresses = dns.addresses[::-1]
    await lines._look_up()
    assert {line.address.target for line in lines._lines} == first
    await lines.close()


async def test_retired_lines_are_bounded(dns: Names) -> None:
    lines = make_lines(["routers"])
    seen: list[Line] = []
    for port in range(1, RETIRED_MAX + 5):
        dns.addresses = [f"127.0.0.1:{port}"]
        await lines._look_up()
        (line,) = lines._lines
        line.calls = 1  # somebody waits for it, so it stays
        lines.reserved(line, f"replica-{port}-1")
        seen.append(line)
    assert lines._retired == seen[-RETIRED_MAX - 1 : -1]
    assert [lines.owner(f"replica-{port}-7") is not None for port in range(1, 6)] == (
        [False] * 3 + [True] * 2
    )
    await lines.close()


async def test_names_of_routers_are_bounded_and_the_last_heard_stay(dns: Names) -> None:
    dns.addresses = ["127.0.0.1:1"]
    lines = make_lines(["routers"])
    await lines._look_up()
    (line,) = lines._lines
    lines.reserved(line, "kept-1")
    for i in range(OWNERS_MAX + 5):
        lines.reserved(line, f"r{i}-1")
        lines.reserved(line, "kept-1")
    assert len(lines._owners) == OWNERS_MAX
    assert lines.owner("kept-1") is line
    assert lines.owner("r0-1") is None
    await lines.close()


@pytest.mark.parametrize("batching", [True, False])
async def test_a_call_that_moves_on_says_how_long_it_has_waited(
    servers: list[Server], batching: bool
) -> None:
    two = servers[:2]
    client, clock = make_client(addresses(two), batching=batching)
    async with client:
        await all_connected(client, 2)
        before = asked(two)
        for server in two:
            server.router.routes.clear()
        call = asyncio.create_task(client.route(token_ids=TOKENS))
        await until(lambda: asked(two) != before)
        gone, other = two if asked(two)[0] > before[0] else reversed(two)
        clock.now_s += 2.0
        other.router.routes.set()
        await gone.stop()
        await call
        assert not gone.router.asked[-1].HasField("waited_ms")
        moved = other.router.asked[-1]
        assert moved.request_id == gone.router.asked[-1].request_id
        assert moved.waited_ms == 2000
        await gone.start()
