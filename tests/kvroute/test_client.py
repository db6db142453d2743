"""The client against a real gRPC server that answers as the test scripts it."""

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop
from grpc_health.v1.health_pb2 import HealthCheckResponse

from kvroute.client import (
    ClientClosed,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    KvRouteClient,
    KvRouteError,
    NotFound,
    NoWorker,
    OverlapTokens,
    Overloaded,
    RetryPolicy,
    RouterUnreachable,
    Unavailable,
    UnknownModel,
    UnknownWorker,
    error_from_status,
)
from kvroute.client.connections.channel import Target, targets_of
from kvroute.client.messages.pick import INSTANCE_LABEL, ONE_TOKEN
from kvroute.v1 import (
    Alternative,
    BlockHashes,
    MultimodalItem,
    Phase,
    PrefillWorker,
    Progress,
    ProgressResult,
    ProgressState,
    Receipt,
    RouteRequest,
    RouteResponse,
    WorkerStatus,
    router_pb2,
)
from tests.kvroute.scripted_router import GUARD_S, Clock, Server, pick_of, status

Code = grpc.StatusCode
NO_WORKER = status(Code.UNAVAILABLE, "NO_WORKER")
FULL = status(Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", retry_after_s=0.5)
TOKENS = [1, 2, 3]


def make_client(server: Server, clock: Clock | None = None, **settings: Any) -> KvRouteClient:
    clock = clock or Clock()
    return KvRouteClient(server.address, clock=clock, sleep=clock.sleep, **settings)


# What is asked, what is answered


async def test_a_pick_has_all_that_the_router_said(server: Server) -> None:
    server.router.answer = RouteResponse(
        reservation_id="r-7",
        worker_id="w7",
        dp_rank=0,
        address="http://w7:8000",
        labels={"zone": "a"},
        prefill_worker=PrefillWorker(
            worker_id="p1",
            address="http://p1:8000",
            engine="sglang",
            bootstrap_host="p1",
            bootstrap_port=8998,
            bootstrap_room=77,
        ),
        alternatives=[Alternative(worker_id="w8", dp_rank=3, address="http://w8:8000", cost=0.5)],
        overlap_tokens=router_pb2.OverlapTokens(raw=64, usable=48, device=24, host=16, predicted=8),
        new_tokens=16,
        estimated_ttft_ms=12.5,
        estimated_tpot_ms=8.5,
        queue_ms=1.5,
        engine_priority=-2,
        lease_s=30.0,
        receipt=Receipt(policy="least-loaded"),
    )
    async with make_client(server) as client:
        pick = await client.route(token_ids=TOKENS, request_id="a")
    assert (pick.request_id, pick.reservation_id) == ("a", "r-7")
    assert (pick.worker_id, pick.dp_rank, pick.address) == ("w7", 0, "http://w7:8000")
    assert pick.headers == {"X-data-parallel-rank": "0"}
    assert pick.labels == {"zone": "a"}
    assert pick.overlap_tokens == OverlapTokens(
        raw=64, usable=48, device=24, host=16, disk=0, predicted=8
    )
    assert (pick.new_tokens, pick.queue_ms, pick.lease_s) == (16, 1.5, 30.0)
    assert pick.estimated_ttft_ms == 12.5
    assert pick.estimated_tpot_ms == 8.5
    assert pick.engine_priority == -2
    assert pick.prefill_worker is not None
    assert pick.prefill_worker.dp_rank is None
    both = {"bootstrap_host": "p1", "bootstrap_port": 8998, "bootstrap_room": 77}
    assert pick.prefill_worker.prefill_body == {**ONE_TOKEN, **both}
    assert pick.prefill_worker.decode_body() == both
    assert pick.prefill_worker.headers == {}
    (other,) = pick.alternatives
    assert (other.worker_id, other.dp_rank, other.cost) == ("w8", 3, 0.5)
    assert pick.receipt.policy == "least-loaded"
    assert pick.response == server.router.answer


@pytest.mark.parametrize("rank", [None, 3])
async def test_a_pick_behind_dynamos_frontend_names_its_instance(
    server: Server, rank: int | None
) -> None:
    labels = {INSTANCE_LABEL: "7587890123456789"}
    server.router.answer = RouteResponse(reservation_id="r", dp_rank=rank, labels=labels)
    async with make_client(server) as client:
        pick = await client.route(token_ids=TOKENS)
        ranked = {"X-data-parallel-rank": "3", "x-dynamo-dp-rank": "3"} if rank else {}
        assert pick.headers == {"x-dynamo-worker-instance-id": "7587890123456789", **ranked}
        for odd in ("", "a\r\nx: y", "-1", "\u0663"):
            server.router.answer.labels[INSTANCE_LABEL] = odd
            pick = await client.route(token_ids=TOKENS)
            assert "x-dynamo-worker-instance-id" not in pick.headers


NIXL_ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8, 9, 10, 11, 12, 13]],
    "remote_engine_id": "747093e7-b1e5-4e2a-ae1f-9f531a397758",
    "remote_request_id": "cmpl-b209f508ce56fc5b-0-bcaeb7c7",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 200,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
"""What a prefill worker answered (vLLM 0.32.0, NixlConnector, a prompt of 200 tokens)."""


async def test_a_vllm_pair_is_told_by_kv_transfer_params(server: Server) -> None:
    other = PrefillWorker(
        worker_id="p1",
        dp_rank=2,
        engine="vllm",
        prefill_kv_transfer_params='{"do_remote_decode": true}',
    )
    server.router.answer = RouteResponse(reservation_id="r-7", prefill_worker=other)
    async with make_client(server) as client:
        pick = await client.route(token_ids=TOKENS, request_id="q7")
        assert pick.prefill_worker is not None
        told_both = {"X-Request-Id": "q7"}
        assert pick.prefill_worker.headers == told_both | {"X-data-parallel-rank": "2"}
        assert pick.headers == told_both
        assert pick.prefill_worker.prefill_body == {
            **ONE_TOKEN,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        answer = {"kv_transfer_params": NIXL_ANSWER}
        assert pick.prefill_worker.decode_body(answer) == answer
        assert pick.prefill_worker.decode_body({}) == {}
        other.decode_kv_transfer_params = '{"transfer_id": "t"}'
        server.router.answer = RouteResponse(reservation_id="r-8", prefill_worker=other)
        pick = await client.route(token_ids=TOKENS)
        assert pick.prefill_worker is not None
        told = pick.prefill_worker.decode_body(answer)
        assert told == {"kv_transfer_params": {"transfer_id": "t"}}


async def test_what_the_router_left_out_is_none_and_not_zero(server: Server) -> None:
    async with make_client(server) as client:
        pick = await client.route(token_ids=TOKENS)
    assert pick.dp_rank is None
    assert pick.engine_priority is None
    assert pick.prefill_worker is None
    assert pick.headers == {}


async def test_every_option_reaches_the_router(server: Server) -> None:
    item = MultimodalItem(hash=5, first_token=1, token_count=2)
    async with make_client(server) as client:
        await client.route(
            model="m",
            token_ids=np.array(TOKENS),
            request_id="id",
            lora_name="l",
            cache_salt="s",
            multimodal_items=[item],
            expected_output_tokens=0,
            priority=0,
            tenant="t",
            session_id="c",
            ttft_slo_ms=0,
            tpot_slo_ms=40,
            queue_timeout_ms=0,
            phase=Phase.PHASE_PREFILL,
            required_labels={"zone": "a"},
            allowed_worker_ids=["w0"],
            excluded_worker_ids={"w1"},
            policy="round-robin",
        )
    (asked,) = server.router.asked
    assert asked == RouteRequest(
        model="m",
        token_bytes=struct.pack("<3I", *TOKENS),
        request_id="id",
        lora_name="l",
        cache_salt="s",
        multimodal_items=[item],
        expected_output_tokens=0,
        priority=0,
        tenant="t",
        session_id="c",
        ttft_slo_ms=0,
        tpot_slo_ms=40,
        queue_timeout_ms=0,
        phase=Phase.PHASE_PREFILL,
        required_labels={"zone": "a"},
        allowed_worker_ids=["w0"],
        excluded_worker_ids=["w1"],
        policy="round-robin",
    )


async def test_options_that_are_none_are_absent(server: Server) -> None:
    async with make_client(server) as client:
        await client.route(
            token_ids=b"", request_id="id", priority=None, model=None, ttft_slo_ms=None
        )
    assert server.router.asked == [RouteRequest(request_id="id", token_bytes=b"")]
    assert not server.router.asked[0].HasField("priority")


async def test_block_hashes_are_the_other_form_of_a_prompt(server: Server) -> None:
    hashes = [2**64 - 1, 16863443419780771464]
    async with make_client(server) as client:
        await client.route(block_hashes=hashes, block_size=16, prompt_tokens=40)
        held = np.array(hashes, np.uint64)
        await client.route(block_hashes=held, block_size=16, prompt_tokens=40)
    for asked in server.router.asked:
        assert asked.block_hashes == BlockHashes(hashes=hashes, block_size=16, prompt_tokens=40)


@pytest.mark.parametrize(
    "prompt",
    [
        {"token_ids": TOKENS, "block_hashes": [1], "block_size": 16, "prompt_tokens": 16},
        {"block_hashes": [1], "prompt_tokens": 16},
        {"block_hashes": [1], "block_size": 16},
        {"token_ids": TOKENS, "block_size": 16},
        {"token_ids": b"123"},
    ],
)
async def test_a_prompt_that_cannot_be_meant_is_refused_before_it_is_sent(
    server: Server, prompt: Any
) -> None:
    async with make_client(server) as client:
        with pytest.raises(InvalidRequest):
            await client.route(**prompt)
        with pytest.raises(InvalidRequest):
            client.request(**prompt)
    assert server.router.asked == []


async def test_a_keyword_that_does_not_exist_is_refused(server: Server) -> None:
    wrong: Any = {"token_idz": TOKENS}
    async with make_client(server) as client:
        with pytest.raises(TypeError, match="token_idz"):
            await client.route(**wrong)


async def test_a_decode_of_a_known_session_needs_no_prompt(server: Server) -> None:
    async with make_client(server) as client:
        await client.route(phase=Phase.PHASE_DECODE, session_id="c")
    assert server.router.asked[0].WhichOneof("prompt") is None


async def test_each_request_gets_an_id_of_its_own(server: Server) -> None:
    async with make_client(server) as client:
        picks = [await client.route(token_ids=TOKENS) for _ in range(2)]
    ids = [asked.request_id for asked in server.router.asked]
    assert [pick.request_id for pick in picks] == ids
    assert len(set(ids)) == 2
    assert all(len(one) == 32 for one in ids)


async def test_a_prompt_of_a_million_tokens_passes(server: Server) -> None:
    async with make_client(server) as client:
        with pytest.raises(Overloaded) as caught:  # this server keeps gRPC's own limit of 4 MB
            await client.route(token_ids=np.zeros(2_000_000, np.int64))
        assert caught.value.retry_after_s is None
        await client.route(token_ids=np.zeros(1_000_000, np.int64))
    assert len(server.router.asked[0].token_bytes) == 4_000_000


# Retries


async def test_unavailable_is_tried_again_with_the_same_request(server: Server) -> None:
    server.router.refusals.extend([NO_WORKER, NO_WORKER])
    clock = Clock()
    async with make_client(server, clock) as client:
        pick = await client.route(token_ids=TOKENS)
    assert pick.worker_id == "w0"
    first, second, third = server.router.asked
    assert first == second == third
    assert first.request_id
    waits = clock.slept_s
    assert 0 <= waits[0] <= 0.1
    assert 0 <= waits[1] <= 0.2


async def test_attempts_are_bounded_and_the_last_error_is_raised(server: Server) -> None:
    server.router.refusals.extend([NO_WORKER] * 10)
    clock = Clock()
    async with make_client(server, clock, retry=RetryPolicy(attempts=3)) as client:
        with pytest.raises(NoWorker) as caught:
            await client.route(token_ids=TOKENS)
    assert caught.value.reason == "NO_WORKER"
    assert len(server.router.asked) == 3
    assert len(clock.slept_s) == 2


async def test_resource_exhausted_is_tried_again_after_the_time_that_retry_info_gives(
    server: Server,
) -> None:
    server.router.refusals.extend([FULL, FULL])
    clock = Clock()
    async with make_client(server, clock, retry=RetryPolicy(backoff_s=0.0)) as client:
        await client.route(token_ids=TOKENS)
    assert clock.slept_s == [0.5, 0.5]
    assert len(server.router.asked) == 3


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (status(Code.INVALID_ARGUMENT, "EMPTY_PROMPT"), InvalidRequest),
        (status(Code.RESOURCE_EXHAUSTED, "TOO_MANY_RESERVATIONS"), Overloaded),
        (status(Code.NOT_FOUND, "UNKNOWN_MODEL"), UnknownModel),
        (status(Code.ALREADY_EXISTS, "REQUEST_ID_REUSED", retry_after_s=0.1), DuplicateRequest),
        (status(Code.INTERNAL, "INTERNAL", retry_after_s=0.1), KvRouteError),
        (status(Code.ABORTED), KvRouteError),
    ],
)
async def test_nothing_else_is_tried_again(
    server: Server, refusal: Any, kind: type[KvRouteError]
) -> None:
    server.router.refusals.append(refusal)
    clock = Clock()
    async with make_client(server, clock) as client:
        with pytest.raises(kind) as caught:
            await client.route(token_ids=TOKENS)
    assert type(caught.value) is kind
    assert caught.value.message == "said the script"
    assert len(server.router.asked) == 1
    assert clock.slept_s == []


async def test_a_wait_past_the_deadline_is_not_begun(server: Server) -> None:
    refusal = status(Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", retry_after_s=5.0)
    server.router.refusals.append(refusal)
    clock = Clock()
    async with make_client(server, clock) as client:
        with pytest.raises(Overloaded) as caught:
            await client.route(token_ids=TOKENS, timeout_s=5.0)
    assert caught.value.retry_after_s == 5.0
    assert clock.slept_s == []


async def test_each_attempt_has_what_is_left_of_the_time(server: Server) -> None:
    later = status(Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", retry_after_s=30.0)
    server.router.refusals.extend([later, later])
    policy = RetryPolicy(backoff_s=0.0)
    async with make_client(server, retry=policy) as client:
        await client.route(token_ids=TOKENS, timeout_s=100.0)
    first, second, third = server.router.left_s  # gRPC sends them rounded
    assert 80.0 < first <= 101.0
    assert 50.0 < second <= 71.0
    assert 20.0 < third <= 41.0


async def test_a_sleep_that_takes_too_long_ends_with_the_error_at_hand(server: Server) -> None:
    server.router.refusals.append(NO_WORKER)
    clock = Clock()

    async def oversleep() -> None:
        clock.now_s += 60.0

    clock.before_waking = oversleep
    async with make_client(server, clock) as client:
        with pytest.raises(NoWorker):
            await client.route(token_ids=TOKENS)
    assert len(server.router.asked) == 1


async def test_a_router_that_does_not_answer_in_time_is_a_deadline_exceeded(
    server: Server,
) -> None:
    server.router.routes.clear()
    async with make_client(server, timeout_s=0.05) as client:
        with pytest.raises(DeadlineExceeded):
            await client.route(token_ids=TOKENS)
        with pytest.raises(TimeoutError):
            await client.route(token_ids=TOKENS)
    server.router.routes.set()


async def test_no_router_at_all_is_unreachable_after_all_attempts() -> None:
    with socket.socket() as taken:  # bound, never listening: nobody else can be there
        taken.bind(("127.0.0.1", 0))
        clock = Clock()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with KvRouteClient(address, clock=clock, sleep=clock.sleep) as client:
            with pytest.raises(RouterUnreachable) as caught:
                await client.route(token_ids=TOKENS)
    assert caught.value.reason is None
    assert len(clock.slept_s) == RetryPolicy().attempts - 1


async def test_a_router_that_goes_away_and_comes_back_is_found_again(server: Server) -> None:
    clock = Clock()
    async with make_client(server, clock) as client:
        await client.route(token_ids=TOKENS)
        await server.stop()

        async def come_back() -> None:
            clock.before_waking = None
            await server.start()
            await connected(client)

        clock.before_waking = come_back
        pick = await client.route(token_ids=TOKENS)
    assert pick.worker_id == "w0"
    assert len(clock.slept_s) == 1
    assert len(server.router.asked) == 2


async def connected(client: KvRouteClient) -> None:
    """Waits for gRPC's own reconnect."""
    line = await client._transport.line(GUARD_S)
    async with asyncio.timeout(GUARD_S):
        while not await line.settled():  # noqa: ASYNC110  # gRPC's backoff is its own
            await asyncio.sleep(0.005)


# Other calls


async def test_explain_answers_even_when_nobody_could_be_picked(server: Server) -> None:
    server.router.refusals.append(NO_WORKER)
    async with make_client(server) as client:
        explanation = await client.explain(token_ids=TOKENS, model="m")
    first, second = server.router.asked
    assert first == second
    assert isinstance(error_from_status(explanation.refusal), NoWorker)


async def test_report_moves_several_reservations_and_is_retried(server: Server) -> None:
    server.router.report_refusals.append(NO_WORKER)
    unknown = ProgressResult.PROGRESS_RESULT_UNKNOWN
    server.router.report_results.extend([ProgressResult.PROGRESS_RESULT_APPLIED, unknown])
    steps = [
        Progress(reservation_id=name, state=ProgressState.PROGRESS_STATE_FINISHED)
        for name in ("a", "b")
    ]
    async with make_client(server) as client:
        outcomes = await client.report(*steps)
    assert [outcome.reservation_id for outcome in outcomes] == ["a", "b"]
    assert outcomes[1].result == unknown
    told = [await server.next_report() for _ in range(4)]
    assert told == steps + steps


async def test_a_report_asked_for_raises_what_went_wrong(server: Server) -> None:
    server.router.report_refusals.append(status(Code.PERMISSION_DENIED))
    async with make_client(server) as client:
        with pytest.raises(KvRouteError, match="PERMISSION_DENIED"):
            await client.report(Progress(reservation_id="a"))


async def test_workers_and_index_can_be_looked_at(server: Server) -> None:
    server.fleet.refusals.append(NO_WORKER)
    async with make_client(server) as client:
        assert await client.list_workers("m") == [WorkerStatus(worker_id="w0", model="m")]
        assert await client.list_workers() == [WorkerStatus(worker_id="w0")]
        assert (await client.index_stats()).blocks == 7


async def test_commands_say_what_was_asked_and_return_the_ranks(server: Server) -> None:
    async with make_client(server) as client:
        assert await client.drain_worker("w") == 2
        assert await client.undrain_worker("w") == 2
        assert await client.remove_worker("w", tombstone_s=1.5) == 2
        assert await client.resync_worker("w") == 2
        engine = {"engine": "vllm", "address": "http://w:8000"}
        await client.register_worker("w", **engine, events="tcp://w:5557", labels={"a": "b"})
        ranks = await client.register_worker("v", **engine, role="prefill", warm=True, ranks=2)
        assert ranks == 2
    drain, undrain, remove, resync, register, warmed = server.fleet.asked
    assert (drain.worker_id, drain.undrain, undrain.undrain) == ("w", False, True)
    assert (remove.worker_id, remove.tombstone_s, resync.worker_id) == ("w", 1.5, "w")
    assert (register.engine, register.replay, dict(register.labels)) == ("vllm", "", {"a": "b"})
    assert (register.role, register.warm, register.HasField("ranks")) == ("", False, False)
    assert (warmed.worker_id, warmed.role, warmed.warm) == ("v", "prefill", True)


async def test_commands_are_sent_once(server: Server) -> None:
    server.fleet.refusals.append(status(Code.UNAVAILABLE, "NO_BROKER", retry_after_s=0.1))
    server.fleet.refusals.append(status(Code.NOT_FOUND, "UNKNOWN_WORKER"))
    async with make_client(server) as client:
        with pytest.raises(Unavailable) as caught:
            await client.remove_worker("w")
        assert caught.value.reason == "NO_BROKER"
        with pytest.raises(UnknownWorker):
            await client.drain_worker("w")
    assert len(server.fleet.asked) == 2


async def test_a_watch_yields_every_message(server: Server) -> None:
    server.fleet.refusals.append(NO_WORKER)
    async with make_client(server) as client:
        watch = client.watch_workers("m")
        assert [one.worker_id for one in (await anext(watch)).changed] == ["w0"]
        assert [one.worker_id for one in (await anext(watch)).removed] == ["w0"]
        await watch.aclose()
    assert [asked.model for asked in server.fleet.asked] == ["m", "m"]


async def test_a_watch_goes_on_with_another_connection_and_misses_no_removal(
    server: Server,
) -> None:
    server.fleet.watch_ends.extend([status(Code.OK), status(Code.UNAVAILABLE, "DRAINING")])
    server.fleet.workers = ["w0", "w1", "w2"]
    clock = Clock()
    async with make_client(server, clock) as client:
        watch = client.watch_workers()
        seen = [await anext(watch)]
        server.fleet.workers = ["w0", "w2"]
        seen.append(await anext(watch))
        server.fleet.workers = ["w2"]
        seen += [await anext(watch), await anext(watch)]
        await watch.aclose()
    assert [[one.worker_id for one in message.changed] for message in seen] == [
        ["w0", "w1", "w2"],
        ["w0", "w2"],
        ["w2"],
        [],
    ]
    assert [[one.worker_id for one in message.removed] for message in seen] == [
        [],
        ["w1"],
        ["w0"],
        ["w0"],
    ]
    assert all(waited_s <= 0.1 for waited_s in clock.slept_s), "each beginning ends the backoff"


async def test_a_watch_of_a_router_that_is_gone_raises_after_all_attempts(server: Server) -> None:
    server.fleet.watch_ends.append(status(Code.OK))
    clock = Clock()
    async with make_client(server, clock, retry=RetryPolicy(attempts=3)) as client:
        watch = client.watch_workers()
        await anext(watch)
        await server.stop()
        with pytest.raises(RouterUnreachable):
            await anext(watch)
    assert len(clock.slept_s) == 3


async def test_a_watch_that_may_not_be_raises(server: Server) -> None:
    server.fleet.refusals.append(status(Code.PERMISSION_DENIED))
    async with make_client(server) as client:
        with pytest.raises(KvRouteError, match="PERMISSION_DENIED"):
            await anext(client.watch_workers())
    assert len(server.fleet.asked) == 1


async def test_ready_is_when_the_router_says_so(server: Server) -> None:
    clock = Clock()
    await server.health.set("readiness", HealthCheckResponse.NOT_SERVING)

    async def get_ready() -> None:
        if len(clock.slept_s) == 3:
            await server.health.set("readiness", HealthCheckResponse.SERVING)

    clock.before_waking = get_ready
    async with make_client(server, clock) as client:
        await client.wait_ready()
    assert clock.slept_s == [0.1, 0.2, 0.4]


async def test_waiting_for_readiness_ends_with_what_was_seen_last(server: Server) -> None:
    await server.health.set("readiness", HealthCheckResponse.NOT_SERVING)
    async with make_client(server) as client:
        with pytest.raises(
            DeadlineExceeded, match="not ready after 3 s; the last answer: NOT_SERVING"
        ):
            await client.wait_ready(3.0)
        await server.stop()
        with pytest.raises(DeadlineExceeded, match="the last answer: UNAVAILABLE"):
            await client.wait_ready(1.0)


async def test_a_server_that_is_no_router_is_not_waited_for(server: Server) -> None:
    async with make_client(server) as client:
        with pytest.raises(NotFound):
            await client.wait_ready()


# Connections


async def test_the_token_is_sent_with_every_attempt_and_shown_nowhere(server: Server) -> None:
    server.router.refusals.append(NO_WORKER)
    tokens = iter(["first", "second"])
    async with make_client(server, token=lambda: next(tokens)) as client:
        await client.route(token_ids=TOKENS)
    assert [sent["authorization"] for sent in server.router.metadata] == [
        "Bearer first",
        "Bearer second",
    ]
    async with make_client(server, token="secret") as client:
        await client.route(token_ids=TOKENS)
        assert "secret" not in repr(client)
    assert server.router.metadata[-1]["authorization"] == "Bearer secret"


async def test_a_unix_socket_is_a_target(tmp_path: Path) -> None:
    server = Server()
    address = f"unix:{tmp_path}/kvroute.sock"
    await server.start(address)
    async with KvRouteClient(address) as client:
        assert (await client.route(token_ids=TOKENS)).worker_id == "w0"
    await server.stop()


async def test_several_targets_share_the_requests_and_one_may_be_away() -> None:
    servers = [Server(), Server()]
    for i, server in enumerate(servers):
        await server.start("127.0.0.1:0")
        server.router.answer = pick_of(f"w{i}")
    async with KvRouteClient([server.address for server in servers]) as client:
        async with asyncio.timeout(GUARD_S):
            while not all(server.router.asked for server in servers):
                await client.route(token_ids=TOKENS)
        await servers[0].stop()
        seen = {(await client.route(token_ids=TOKENS)).worker_id for _ in range(4)}
    assert seen == {"w1"}
    await servers[1].stop()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("router.example:50051", [Target("router.example:50051", "router.example", "50051")]),
        ("dns:///router:1", [Target("router:1", "router", "1")]),
        ("router", [Target("router", "router", "443")]),
        ("10.0.0.1:1", [Target("10.0.0.1:1")]),
        ("[::1]:1", [Target("[::1]:1")]),
        ("[::1]", [Target("[::1]")]),
        ("unix:50051", [Target("unix:50051", "unix", "50051")]),
        ("ipv6:2001:db8::1,[::1]:2", [Target("2001:db8::1"), Target("[::1]:2")]),
        ("unix:/run/kvroute.sock", [Target("unix:/run/kvroute.sock")]),
        ("xds:///router:1", [Target("xds:///router:1")]),
        ("dns://10.0.0.53/router:1", [Target("dns://10.0.0.53/router:1")]),
        ("ipv4:10.0.0.1:1,10.0.0.2:2", [Target("10.0.0.1:1"), Target("10.0.0.2:2")]),
        (
            ["a:1", "[::1]:2", "unix:s"],
            [Target("a:1", "a", "1"), Target("[::1]:2"), Target("unix:s")],
        ),
    ],
)
def test_targets_are_names_to_resolve_or_what_grpc_knows(
    targets: Any, expected: list[Target]
) -> None:
    assert targets_of(targets) == expected


@pytest.mark.parametrize(
    "target",
    [
        *("router:0", "router:65536", "router:65537", "router:500510", "10.0.0.1:99999"),
        *("[::1]:70000", "ipv4:10.0.0.1:70000", "ipv6:[::1]:0", "dns:///router:70000"),
        *("fe80::1:50051", "::1", "[::1", "[router]:1", "[::1]50051", ":50051", "router:"),
        *("http://router:50051", "https://router", "tcp://router:1", "a:1,b:2", "router:abc"),
        *("two words:1", "ipv4:", "ipv4:10.0.0.1:1,"),
    ],
)
def test_a_target_that_grpc_would_read_as_another_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="is no target: "):
        targets_of(target)


@pytest.mark.parametrize("targets", ["", [], ["a", ""]])
def test_a_target_that_is_empty_is_refused(targets: Any) -> None:
    with pytest.raises(ValueError, match="target"):
        KvRouteClient(targets)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        KvRouteClient("127.0.0.1:1", timeout_s=seconds)
    with pytest.raises(ValueError, match="report_timeout_s"):
        KvRouteClient("127.0.0.1:1", report_timeout_s=seconds)


async def test_closing_ends_open_calls_and_later_ones(server: Server) -> None:
    server.router.routes.clear()
    client = make_client(server)
    call = asyncio.create_task(client.route(token_ids=TOKENS))
    await server.router.arrived.wait()
    await client.close()
    with pytest.raises(ClientClosed):
        await call
    with pytest.raises(ClientClosed):
        await client.route(token_ids=TOKENS)
    await client.close()
    assert "closed" in repr(client)
    server.router.routes.set()


async def test_a_cancelled_call_is_cancelled_and_nothing_else(server: Server) -> None:
    server.router.routes.clear()
    async with make_client(server) as client:
        call = asyncio.create_task(client.route(token_ids=TOKENS))
        await server.router.arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    server.router.routes.set()


def test_the_client_runs_on_uvloop() -> None:
    async def main() -> str:
        server = Server()
        await server.start("127.0.0.1:0")
        async with KvRouteClient(server.address) as client:
            async with client.request(token_ids=TOKENS) as request:
                await request.prefill_done()
            assert client.reports_lost == 0
        await server.stop()
        return request.pick.worker_id

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == "w0"
