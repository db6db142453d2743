"""Picks without a router: which workers, when it begins, and when it ends."""

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest

from kvroute.client import (
    FallbackPolicy,
    InvalidRequest,
    KvRouteClient,
    NoWorker,
    Overloaded,
    Pick,
    RetryPolicy,
    RouteOptions,
    RouterUnreachable,
    UnknownModel,
    route_request,
)
from kvroute.client.fallback import fallback as fallback_module
from kvroute.client.fallback.bounded_hash import bound
from kvroute.client.fallback.fallback import OPEN_S_MAX, RESERVATION, RETRY_S, WORKER_S, Fallback
from kvroute.v1 import (
    Ejection,
    FailureReason,
    ListWorkersRequest,
    Phase,
    Progress,
    ProgressResult,
    ProgressState,
    RouteResponse,
    WorkerStatus,
)
from tests.kvroute.scripted_router import GUARD_S, Clock, Server, status, until

FINISHED = ProgressState.PROGRESS_STATE_FINISHED
FAILED = ProgressState.PROGRESS_STATE_FAILED
WORKER = FailureReason.FAILURE_REASON_WORKER
TIMEOUT = FailureReason.FAILURE_REASON_TIMEOUT
CLIENT = FailureReason.FAILURE_REASON_CLIENT
Code = grpc.StatusCode
TOKENS = list(range(64))
ONCE = RetryPolicy(attempts=1)


def worker(name: str, rank: int = 0, **fields: Any) -> WorkerStatus:
    fields = {"schedulable": True, "model": "m", "role": "both"} | fields
    fields.setdefault("address", f"http://{name}:8000")
    return WorkerStatus(worker_id=name, dp_rank=rank, **fields)


def made(*statuses: WorkerStatus, **policy: float) -> tuple[Fallback, Counter[str]]:
    counts: Counter[str] = Counter()
    fallback = Fallback(FallbackPolicy(**policy), counts, random.Random(1))
    fallback.listed(statuses, 0.0)
    return fallback, counts


def ask(fallback: Fallback, now_s: float = 1.0, **options: Any) -> RouteResponse | None:
    if options.setdefault("token_ids", TOKENS) is None:
        del options["token_ids"]
    typed: RouteOptions = options  # type: ignore[assignment]
    return fallback.pick(route_request(**typed), now_s)


def picked(fallback: Fallback, now_s: float = 1.0, **options: Any) -> str:
    answer = ask(fallback, now_s, **options)
    return "" if answer is None else answer.worker_id


def end(
    fallback: Fallback,
    answer: RouteResponse,
    now_s: float = 1.0,
    reason: FailureReason.ValueType | None = None,
) -> None:
    progress = Progress(reservation_id=answer.reservation_id, state=FINISHED)
    if reason is not None:
        progress.state, progress.failure_reason = FAILED, reason
    fallback.reported(progress, now_s)


FLEET = [worker(f"w{i}") for i in range(5)]


# Which worker


def test_a_session_stays_and_sessions_spread() -> None:
    fallback, counts = made(*FLEET)
    taken = Counter()
    for i in range(200):
        first = ask(fallback, session_id=f"s{i}")
        assert first is not None
        end(fallback, first)
        again = ask(fallback, session_id=f"s{i}", token_ids=[i, 5, 7])
        assert again is not None
        end(fallback, again)
        assert first.worker_id == again.worker_id
        taken[first.worker_id] += 1
    assert min(taken[one.worker_id] for one in FLEET) > 20
    assert counts["fallback_picks"] == 400


def test_prompts_with_the_same_beginning_meet_in_every_form() -> None:
    fallback, _ = made(*FLEET)
    begin = [random.Random(3).randrange(1 << 17) for _ in range(1024)]
    names = set()
    for i in range(3):
        answer = ask(fallback, token_ids=begin + [i] * i)
        assert answer is not None
        names.add(answer.worker_id)
        end(fallback, answer)
    as_ids = route_request(model="m")
    as_ids.token_ids.ids.extend([*begin, 9])
    other = fallback.pick(as_ids, 1.0)
    assert other is not None
    assert names == {other.worker_id}
    end(fallback, other)
    for i in range(2):  # of the first 1,024 tokens, which are two blocks
        hashes = {"block_hashes": [7, 8, i], "block_size": 512, "prompt_tokens": 1540}
        answer = ask(fallback, token_ids=None, **hashes)
        assert answer is not None
        names.add(answer.worker_id)
        end(fallback, answer)
    assert len(names) <= 2


def test_no_worker_is_over_the_bound_of_our_own_open_requests() -> None:
    fallback, _ = made(*FLEET)
    taken: Counter[str] = Counter()
    for i in range(60):
        name = picked(fallback, session_id="always the same" if i % 2 else f"s{i}")
        taken[name] += 1
        assert taken[name] <= bound(i, len(FLEET))


def test_requests_that_a_router_placed_count_as_open() -> None:
    fallback, _ = made(worker("w0"), worker("w1"))
    first = picked(fallback, session_id="s")
    for _ in range(4):
        fallback.began((first, 0))
    assert picked(fallback, session_id="s") != first


def test_the_answer_has_what_a_caller_needs_and_nothing_reserved() -> None:
    fallback, _ = made(worker("w", 0, labels={"zone": "a"}), worker("w", 1), worker("v"))
    seen = set()
    for i in range(20):
        answer = ask(fallback, session_id=f"s{i}")
        assert answer is not None
        assert answer.reservation_id.startswith(RESERVATION)
        assert answer.lease_s == 0
        assert answer.address == f"http://{answer.worker_id}:8000"
        assert len(answer.alternatives) <= 2
        assert answer.HasField("dp_rank") == (answer.worker_id == "w"), "of several ranks only"
        seen.add((answer.worker_id, answer.dp_rank))
    assert seen == {("w", 0), ("w", 1), ("v", 0)}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"model": "m"}, {"w0", "w1"}),
        ({"model": "alias"}, {"w1"}),
        ({"model": "adapter"}, {"w1"}),
        ({"model": "n"}, {"n"}),
        ({"model": "unheard"}, {""}),
        ({}, {""}),  # of two models, none is meant
        ({"model": "m", "lora_name": "adapter"}, {"w0", "w1"}),  # w0 may load any
        ({"model": "m", "expected_output_tokens": 100}, {"w0"}),
        ({"model": "p", "phase": Phase.PHASE_PREFILL}, {"pre"}),
        ({"model": "p", "phase": Phase.PHASE_DECODE}, {"dec"}),
        ({"model": "p", "phase": Phase.PHASE_PREFILL_DECODE}, {"dec"}),
        ({"model": "p"}, {""}),
        ({"model": "p", "phase": Phase.PHASE_DECODE, "session_id": "s", "token_ids": None}, {""}),
    ],
)
def test_only_workers_that_fit_the_request_are_picked(
    options: dict[str, Any], left: set[str]
) -> None:
    fallback, counts = made(
        worker("w0", labels={"zone": "a"}),
        worker("w1", model_aliases=["alias"], lora_names=["adapter"], max_model_len=100),
        worker("n", model="n"),
        worker("pre", model="p", role="prefill"),
        worker("dec", model="p", role="decode"),
    )
    sessions = [options.get("session_id") or f"s{i}" for i in range(20)]
    assert {picked(fallback, **options | {"session_id": one}) for one in sessions} == left
    assert counts["fallback_refused"] == (20 if left == {""} else 0)


@pytest.mark.parametrize(
    "left_out",
    [
        {"schedulable": False, "unschedulable_reason": "silent"},
        {"drained": True},
        {"address": ""},
        {"drained": True, "last_resort": True, "schedulable": False},
    ],
)
def test_workers_that_no_router_would_pick_are_left_out(left_out: dict[str, Any]) -> None:
    fallback, _ = made(worker("w0", **left_out), worker("w1"))
    assert {picked(fallback, session_id=f"s{i}") for i in range(10)} == {"w1"}


@pytest.mark.parametrize(
    "second",
    [{"schedulable": False, "last_resort": True}, {"ejection": Ejection(reason="refused")}],
)
def test_workers_of_the_second_choice_come_second(second: dict[str, Any]) -> None:
    fallback, _ = made(worker("w0", **second), worker("w1"))
    assert {picked(fallback, session_id=f"s{i}") for i in range(10)} == {"w1"}
    assert picked(fallback, excluded_worker_ids=["w1"]) == "w0"


def test_where_all_have_failed_those_that_refused_connections_come_last() -> None:
    fallback, _ = made(*FLEET, avoid_s=10.0)
    for i, one in enumerate(FLEET):
        fallback.began((one.worker_id, 0))
        fallback.ended((one.worker_id, 0), 1.0, WORKER, refused=i != 3)
    for i in range(20):
        assert picked(fallback, 2.0, session_id=f"s{i}") == "w3"
    fallback.ended(("w3", 0), 2.0, WORKER, refused=True)
    assert picked(fallback, 3.0), "rather a dead one than none"
    assert {picked(fallback, 11.5, session_id=f"s{i}") for i in range(50)} == {
        f"w{i}" for i in (0, 1, 2, 4)
    }, "the time of the others is over"


@pytest.mark.parametrize(
    ("reason", "avoided"), [(WORKER, True), (TIMEOUT, True), (CLIENT, False), (None, False)]
)
def test_a_worker_that_failed_is_avoided_for_a_while(
    reason: FailureReason.ValueType | None, avoided: bool
) -> None:
    fallback, _ = made(*FLEET, avoid_s=10.0)
    first = ask(fallback, session_id="s")
    assert first is not None
    end(fallback, first, 1.0, reason)
    again = ask(fallback, 2.0, session_id="s")
    assert again is not None
    assert (again.worker_id != first.worker_id) is avoided
    end(fallback, again)
    assert picked(fallback, 11.5, session_id="s") == first.worker_id


def test_if_all_failed_all_are_tried() -> None:
    fallback, _ = made(worker("w0"), worker("w1"))
    for key in (("w0", 0), ("w1", 0)):
        fallback.began(key)
        fallback.ended(key, 1.0, WORKER)
    assert picked(fallback) in {"w0", "w1"}


# Lists


def test_a_list_is_used_for_so_long_and_no_longer() -> None:
    fallback, _ = made(*FLEET, age_s_max=100.0)
    assert picked(fallback, 100.0)
    assert fallback.usable(100.0)
    assert picked(fallback, 100.5) == ""
    assert not fallback.usable(100.5)


@pytest.mark.parametrize("statuses", [[], [worker("w9", schedulable=False, last_resort=True)]])
def test_a_list_without_a_schedulable_worker_replaces_none(statuses: list[WorkerStatus]) -> None:
    fallback, _ = made(*FLEET, age_s_max=100.0)
    fallback.listed(statuses, 50.0)
    assert picked(fallback, 60.0) in {one.worker_id for one in FLEET}
    assert picked(fallback, 101.0) == "", "nor makes it younger"


def test_lists_are_as_seldom_as_the_fleet_is_large() -> None:
    fallback, _ = made(*FLEET, refresh_s=60.0)
    assert not fallback.routed(1.0), "not with a program's first request"
    assert not fallback.routed(44.0)
    assert fallback.routed(76.0)
    fallback.listed([worker(f"w{i}") for i in range(1000)], 100.0)
    assert not fallback.routed(100.0 + 0.74 * WORKER_S * 1000)
    assert fallback.routed(100.0 + 1.26 * WORKER_S * 1000)
    fallback.not_listed(1000.0)
    assert not fallback.routed(1000.0 + 0.9 * RETRY_S)
    assert fallback.routed(1000.0 + 2 * RETRY_S)


def test_a_prompt_without_tokens_follows_its_first_bytes() -> None:
    fallback, _ = made(*(worker(f"w{i}", max_model_len=1000) for i in range(16)))
    system = b'{"messages": [{"role": "system", "content": "' + b"a" * 3000

    def of(body: bytes) -> str:
        return picked(fallback, token_ids=None, chat_completion_body=body, model="")

    ends = [of(system + b"b" * 2000 + end) for end in (b"one", b"two")]
    assert len({of(b"%d" % i) for i in range(32)}) > 4
    assert ends[0] == ends[1], "the beginning decides"
    assert picked(fallback, token_ids=None, text="x" * 3900)
    assert not picked(fallback, token_ids=None, text="x" * 4100), "longer than any worker takes"


def test_prompts_of_which_only_the_length_is_known_go_to_all() -> None:
    fallback, _ = made(*(worker(f"w{i}", max_model_len=1000) for i in range(16)))

    def of(tokens: int) -> str:
        return picked(fallback, token_ids=None, estimated_tokens=tokens)

    assert len({of(900) for _ in range(32)}) > 4
    assert not of(1001), "longer than any worker takes"


def test_workers_and_open_picks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_module, "WORKERS_MAX", 3)
    monkeypatch.setattr(fallback_module, "OPEN_MAX", 10)
    fallback, _ = made(*FLEET)
    names = {picked(fallback, session_id=f"s{i}") for i in range(50)}
    assert names == {"w0", "w1", "w2"}
    assert len(fallback._picks) == 10
    assert sum(fallback._open.values()) == 10
    for i in range(5):
        fallback.ended((f"gone {i}", 0), 1.0, WORKER)
    assert len(fallback._avoided) == 3


def test_picks_that_nobody_reports_end_by_themselves() -> None:
    fallback, _ = made(*FLEET, age_s_max=1e6)
    for i in range(20):
        picked(fallback, session_id=f"s{i}")
    picked(fallback, 1.0 + OPEN_S_MAX)
    assert sum(fallback._open.values()) == 1


def test_of_several_reports_the_last_state_counts_once() -> None:
    fallback, _ = made(*FLEET)
    answer = ask(fallback)
    assert answer is not None
    running = ProgressState.PROGRESS_STATE_RUNNING
    fallback.reported(Progress(reservation_id=answer.reservation_id, state=running), 1.0)
    assert sum(fallback._open.values()) == 1
    end(fallback, answer)
    end(fallback, answer)
    assert not fallback._open


@pytest.mark.parametrize("name", ["age_s_max", "patience_s", "avoid_s", "refresh_s"])
def test_numbers_that_make_no_sense_are_refused(name: str) -> None:
    for number in (-1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match=name):
            FallbackPolicy(**{name: number})


# The client


@pytest.fixture
def server(server: Server) -> Server:
    server.fleet.statuses = [worker(f"w{i}") for i in range(4)]
    return server


async def make_client(
    server: Server, fallback: FallbackPolicy | bool = True, **settings: Any
) -> tuple[KvRouteClient, Clock]:
    """A client that knows the fleet."""
    clock = Clock()
    settings = {"rng": random.Random(1)} | settings  # six backoffs have a bound, but a high one
    client = KvRouteClient(
        server.address, clock=clock, sleep=clock.sleep, fallback=fallback, **settings
    )
    for _ in range(2):
        await client.route(token_ids=TOKENS)
    if fallback:
        await until(lambda: client.counts["worker_lists"])
    return client, clock


async def routed(client: KvRouteClient) -> Pick:
    """The first pick of a router that is back."""
    async with asyncio.timeout(GUARD_S):
        while True:
            pick = await client.route(token_ids=TOKENS)
            if not pick.fallback:
                return pick
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("batching", [True, False])
async def test_without_routers_the_client_picks_until_one_is_back(
    server: Server, batching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client, clock = await make_client(server, batching=batching)
    async with client:
        await server.stop()
        began_s = clock.now_s
        pick = await client.route(token_ids=TOKENS, session_id="s")
        assert pick.fallback
        assert pick.worker_id in {"w0", "w1", "w2", "w3"}
        assert 0.5 <= clock.now_s - began_s < 2, "the first one has patience"
        slept = len(clock.slept_s)
        await client.report(Progress(reservation_id=pick.reservation_id, state=FINISHED))
        again = await client.route(token_ids=TOKENS, session_id="s")
        assert (again.fallback, again.worker_id) == (True, pick.worker_id)
        assert len(clock.slept_s) == slept, "later ones try once"
        assert client.counts["outages"] == 1
        await server.start()
        assert (await routed(client)).reservation_id == "r-w0"
        assert not client._takeover.fallback.outage  # type: ignore[union-attr]
        assert client.counts["outages"] == 1
        away, back = (one.message for one in caplog.records if one.levelname == "WARNING")
        assert away.startswith(
            "no router answers: requests go to the workers that were listed last"
        )
        assert back.startswith("a router answers again, after ")


async def test_reports_of_a_pick_of_our_own_go_nowhere(server: Server) -> None:
    client, _ = await make_client(server)
    async with client:
        before = client.counts["report_calls"]
        await server.stop()
        async with client.request(token_ids=TOKENS) as request:
            assert request.pick.fallback
            await request.prefill_done()
        pick = await client.route(token_ids=TOKENS)
        step = Progress(reservation_id=pick.reservation_id, state=FINISHED)
        (outcome,) = await client.report(step)
        assert outcome.result == ProgressResult.PROGRESS_RESULT_APPLIED
        assert client.counts["report_calls"] == before
        assert client.reports_lost == 0
        assert not client._takeover.fallback._open  # type: ignore[union-attr]
        await server.start()
        await routed(client)
        theirs = Progress(reservation_id="r-1", state=FINISHED)
        first, second = await client.report(step, theirs)
        assert (first.reservation_id, second.reservation_id) == (pick.reservation_id, "r-1")
    assert [server.router.told.get_nowait().reservation_id] == ["r-1"]


async def test_attempts_go_on_without_routers(server: Server) -> None:
    client, _ = await make_client(server)
    tried: list[str] = []
    async with client:
        await server.stop()
        async for attempt in client.attempts(token_ids=TOKENS):
            async with attempt as request:
                tried.append(request.pick.worker_id)
                if len(tried) < 3:
                    raise TimeoutError
    assert len(set(tried)) == 3


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (status(Code.INVALID_ARGUMENT, "EMPTY_PROMPT"), InvalidRequest),
        (status(Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL"), Overloaded),
        (status(Code.NOT_FOUND, "UNKNOWN_MODEL"), UnknownModel),
        (status(Code.UNAVAILABLE, "NO_WORKER"), NoWorker),
    ],
)
async def test_a_router_s_own_word_is_no_reason_to_pick(
    server: Server, refusal: Any, kind: type[Exception]
) -> None:
    client, _ = await make_client(server, retry=ONCE)
    async with client:
        server.router.refusals.append(refusal)
        with pytest.raises(kind):
            await client.route(token_ids=TOKENS)
        assert client.counts["fallback_picks"] == 0


async def test_a_router_that_is_back_and_knows_no_worker_yet_does_not_end_it(
    server: Server,
) -> None:
    client, _ = await make_client(server)
    async with client:
        await server.stop()
        assert (await client.route(token_ids=TOKENS)).fallback
        server.router.refusals.extend([status(Code.UNAVAILABLE, "NO_WORKER")] * 1000)
        await server.start()
        asked = len(server.router.asked)

        async def heard() -> None:
            async with asyncio.timeout(GUARD_S):
                while len(server.router.asked) == asked:
                    assert (await client.route(token_ids=TOKENS)).fallback
                    await asyncio.sleep(0.01)

        await heard()
        assert (await client.route(token_ids=TOKENS)).fallback
        server.router.refusals.clear()
        assert not (await client.route(token_ids=TOKENS)).fallback


async def test_what_nothing_fits_raises_what_it_would_have_raised(server: Server) -> None:
    client, _ = await make_client(server)
    async with client:
        await server.stop()
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS, model="another")
        assert client.counts["fallback_refused"] > 0


async def test_before_any_list_a_router_that_is_gone_is_an_error(server: Server) -> None:
    clock = Clock()
    async with KvRouteClient(server.address, clock=clock, sleep=clock.sleep) as client:
        await client.route(token_ids=TOKENS)
        await server.stop()
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)


async def test_a_list_that_is_too_old_is_not_used(server: Server) -> None:
    client, clock = await make_client(server, FallbackPolicy(age_s_max=60.0))
    async with client:
        await server.stop()
        clock.now_s += 61
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)


async def test_it_can_be_switched_off(server: Server) -> None:
    client, _ = await make_client(server, fallback=False)
    async with client:
        await server.stop()
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)
    assert server.fleet.asked == []


async def test_a_list_that_is_refused_costs_no_request_and_is_tried_later(server: Server) -> None:
    server.fleet.refusals.append(status(Code.PERMISSION_DENIED))
    clock = Clock()
    async with KvRouteClient(server.address, clock=clock, sleep=clock.sleep) as client:
        for _ in range(2):
            await client.route(token_ids=TOKENS)
        await until(lambda: client.counts["worker_lists_failed"])
        await client.route(token_ids=TOKENS)
        assert server.fleet.asked == [ListWorkersRequest()]
        clock.now_s += 2 * RETRY_S
        await client.route(token_ids=TOKENS)
        await until(lambda: client.counts["worker_lists"])


async def test_closing_ends_a_list_under_way(server: Server) -> None:
    client = KvRouteClient(server.address)
    for _ in range(2):
        await client.route(token_ids=TOKENS)
    assert client._picker.listing is not None
    listing = client._picker.listing
    await client.close()
    assert listing.done()
