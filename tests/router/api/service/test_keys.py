"""gRPC with keys: who is let in, to which methods, models and workers, and how much."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from kvroute.client import KvRouteClient, PermissionDenied
from kvroute.v1 import fleet_pb2, prompts_pb2, prompts_pb2_grpc, router_pb2
from router.api.desk.methods import REPORT, ROUTE, ROUTE_STREAM
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.serving_settings import GrpcSettings
from router.net.keys.certificates import Certificates
from router.net.keys.door import Door
from router.net.keys.issuers import UnknownKeyError
from router.net.keys.rights import RIGHTS, Right
from router.net.keys.usage import PRUNE_S
from router.request.tokens import MadeBy, PromptAsk, PromptTokens
from tests.router.api.service.setting import one_worker, two_models
from tests.stage.certificates import Authority, written
from tests.stage.keys import a_door, bearer, hashed, identity, write_keys
from tests.stage.loopback import TurnedClock
from tests.stage.served import Served, asked, batch_of, refusal, served
from tests.stage.waiting import until

Code = grpc.StatusCode
CALL_S = 60.0
REFUSED = {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}
STREAMS_IN = {"RouteStream", "ServerReflectionInfo"}
STREAMS_OUT = {*STREAMS_IN, "WatchWorkers"}
TURNS = 100
SILENT = "WatchDecisions"
"""Has no message before there is a decision: its headers say that it was let in."""


@asynccontextmanager
async def keyed(folder: Path, *identities: dict[str, Any], **about: Any) -> AsyncIterator[Served]:
    async with served(door=a_door(folder, *identities), **about) as stage:
        one_worker(stage.fleet)
        yield stage


async def status_of(stage: Served, method: str, token: str | None) -> grpc.StatusCode:
    """What a call with an empty message comes to; streams are left after their first message.

    A stream that the caller writes to has no message: one that is refused while the first is
    written ends as INTERNAL in grpc's client.
    """
    metadata = None if token is None else bearer(token)
    name = method.rpartition("/")[2]
    content = b"" if name != "RegisterWorker" else b"\x0a\x01x"
    options: dict[str, Any] = {"metadata": metadata, "timeout": CALL_S}
    if name in STREAMS_IN:
        call: Any = stage.channel.stream_stream(method)(iter(()), **options)
    elif name in {*STREAMS_OUT, SILENT} or method.endswith("Health/Watch"):
        call = stage.channel.unary_stream(method)(content, **options)
    else:
        call = stage.channel.unary_unary(method)(content, **options)
    try:
        if name == SILENT:
            await call.initial_metadata()
            for _ in range(TURNS):  # the status of a refusal comes with its headers
                await asyncio.sleep(0)
            if call.done():
                return await call.code()
            call.cancel()
        elif name in STREAMS_OUT or method.endswith("Health/Watch"):
            async for _ in call:
                break
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


def test_every_method_of_every_service_has_a_rule_and_no_other_has() -> None:
    """Methods of our contract; the test below calls them as they are served."""
    ours = {
        f"/{service.full_name}/{method.name}"
        for file in (router_pb2.DESCRIPTOR, fleet_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert ours <= set(RIGHTS)


async def test_the_table_names_what_the_server_serves(tmp_path: Path) -> None:
    async with keyed(tmp_path, identity("all")) as stage:
        assert set(RIGHTS) == stage.guard.methods


@pytest.mark.parametrize("right", Right)
async def test_a_right_opens_its_methods_and_no_others(tmp_path: Path, right: Right) -> None:
    async with keyed(tmp_path, identity("a", rights=(right.value,))) as stage:
        for method, needed in RIGHTS.items():
            code = await status_of(stage, method, "a-token")
            if needed in (right, None):
                assert code not in REFUSED, method
            else:
                assert code is Code.PERMISSION_DENIED, method


async def test_without_a_key_only_health_answers(tmp_path: Path) -> None:
    async with keyed(tmp_path, identity("a")) as stage:
        before = stage.state()
        for token in (None, "wrong", "", "a-token "[:-2]):
            for method, needed in RIGHTS.items():
                code = await status_of(stage, method, token)
                if needed is not None:
                    assert code is Code.UNAUTHENTICATED, method
                else:
                    listed = method.endswith("/List")
                    assert code is (Code.UNIMPLEMENTED if listed else Code.OK), method
        assert stage.state() == before


async def test_a_refusal_says_no_more_than_it_must_and_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(tmp_path, identity("a", rights=("route",))) as stage:
        messages = set()
        twice = (*bearer("a-token"), *bearer("a-token"))
        for metadata in (None, bearer("wrong"), (("authorization", "Basic YTpi"),), twice):
            refused = await refusal(stage.router.Route(asked(), metadata=metadata))
            assert refused.reason == "UNAUTHENTICATED"
            messages.add(refused.message)
        assert messages == {"the call has no valid key"}
        found = await refusal(stage.call("ListWorkers", metadata=bearer("a-token")))
        assert (found.reason, found.metadata) == ("PERMISSION_DENIED", {"right": "observe"})
        labels = {"method": "Router/Route", "reason": "UNAUTHENTICATED"}
        assert stage.metric("calls_refused_total", **labels) == 4
        labels = {"method": "Fleet/ListWorkers", "reason": "PERMISSION_DENIED"}
        assert stage.metric("calls_refused_total", **labels) == 1
    lines = [record for record in caplog.records if record.name == "kvroute.keys"]
    assert [record.levelno for record in lines] == [logging.WARNING] * 2
    assert "wrong" not in lines[0].message
    assert "identity 'a'" in lines[1].message


async def test_a_verified_tenant_replaces_the_one_of_the_request(tmp_path: Path) -> None:
    seen: list[str] = []
    async with keyed(
        tmp_path, identity("a", tenant="acme", models=["*"], limits={"streams": 5}), identity("b")
    ) as stage:
        admit = stage.desk.admission.route

        def spy(request: Any, *rest: Any, **named: Any) -> Any:
            seen.append(request.tenant)
            return admit(request, *rest, **named)

        stage.desk.admission.route = spy  # type: ignore[method-assign]
        await stage.router.Route(asked(tenant="other"), metadata=bearer("a-token"))
        call = await stage.stream(asked(tenant="other"), metadata=bearer("a-token"))
        await call.done_writing()
        assert [len(answer.results) async for answer in call] == [1]
    assert seen == ["acme", "acme"]


async def test_a_keys_priority_is_lowered_to_its_bound(tmp_path: Path) -> None:
    bound, free = identity("a", limits={"priority": 3}), identity("b")
    wanted = {"a": [(7, 3), (3, 3), (-2, -2)], "b": [(7, 7)]}
    queue = QueueSettings()
    async with served(door=a_door(tmp_path, bound, free), queue=queue) as stage:
        stage.fleet.add("w0", total_slots=1)
        await stage.router.Route(asked(), metadata=bearer("b-token"))
        admission = stage.desk.admission
        for name, cases in wanted.items():
            for number, (named, has) in enumerate(cases):
                request = asked(request_id=f"{name}{number}", priority=named)
                token = bearer(f"{name}-token")
                call = asyncio.ensure_future(stage.router.Route(request, metadata=token))
                await until(lambda: len(admission) == 1, "the request waits")
                (waiter,) = admission.queue.find(request.request_id)
                assert waiter.priority == has
                step = router_pb2.Progress(request_id=request.request_id, priority=named + 1)
                steps = router_pb2.ReportRequest(progress=[step])
                await stage.router.Report(steps, metadata=token)
                assert waiter.priority == (min(named + 1, 3) if name == "a" else named + 1)
                call.cancel()
                await until(lambda: not len(admission), "nothing waits")


async def test_a_model_outside_an_identitys_patterns_is_refused_on_every_path(
    tmp_path: Path,
) -> None:
    async with served(door=a_door(tmp_path, identity("a", models=["alph?"]))) as stage:
        two_models(stage.fleet)
        metadata = bearer("a-token")
        await stage.router.Route(asked(model="alpha"), metadata=metadata)
        before = stage.state()
        for request in (
            asked(model="beta"),
            asked(),
            router_pb2.RouteRequest(text="hello", model="beta"),
            asked(200_000, model="beta"),
        ):
            for method in (stage.router.Route, stage.router.Explain):
                assert (
                    await refusal(method(request, metadata=metadata))
                ).code is Code.PERMISSION_DENIED
        prompts: Any = prompts_pb2_grpc.PromptsStub(stage.channel)
        render = prompts_pb2.RenderRequest(model="beta", text="hello")
        assert (
            await refusal(prompts.Render(render, metadata=metadata))
        ).code is Code.PERMISSION_DENIED
        call = await stage.stream(asked(model="beta"), metadata=metadata)
        await call.done_writing()
        (result,) = [result async for answer in call for result in answer.results]
        assert result.status.code == Code.PERMISSION_DENIED.value[0]
        assert stage.state() == before


async def test_a_worker_outside_an_identitys_patterns_takes_no_command_of_it(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, identity("a", workers=["gpu-*"])) as stage:
        options = {"metadata": bearer("a-token")}
        for call in (
            stage.call("DrainWorker", worker_id="w0", **options),
            stage.call("RemoveWorker", worker_id="w0", **options),
            stage.call("ResyncWorker", worker_id="w0", **options),
            stage.call(
                "RegisterWorker",
                worker_id="w1",
                engine="vllm",
                address="http://127.0.0.1:1",
                **options,
            ),
        ):
            assert (await refusal(call)).code is Code.PERMISSION_DENIED
        assert not stage.sent
        assert not stage.registered


async def test_limits_refuse_calls_and_items_with_retry_info(tmp_path: Path) -> None:
    limits, clock = {"reservations": 2}, TurnedClock()
    door = a_door(tmp_path, identity("a", limits=limits), identity("b"), clock=clock)
    async with served(door=door) as stage:
        one_worker(stage.fleet)
        metadata = bearer("a-token")
        picked = await stage.router.Route(asked(), metadata=metadata)
        call = await stage.stream(asked(), asked(), asked(), metadata=metadata)
        await call.done_writing()
        codes = [result.status.code async for answer in call for result in answer.results]
        assert codes == [0, 8, 8]
        found = await refusal(stage.router.Route(asked(), metadata=metadata))
        assert (found.code, found.reason) == (Code.RESOURCE_EXHAUSTED, "KEY_LIMIT")
        assert found.retry_s is not None
        assert door.refused() == {("a", "reservations"): 3}
        await stage.router.Route(asked(), metadata=bearer("b-token"))  # has no limits
        done = router_pb2.Progress(
            reservation_id=picked.reservation_id, state=router_pb2.PROGRESS_STATE_FINISHED
        )
        report = router_pb2.ReportRequest(progress=[done])
        await stage.router.Report(report, metadata=metadata)
        clock.ahead_s += 2 * PRUNE_S
        await stage.router.Route(asked(), metadata=metadata)


@pytest.mark.parametrize("method", ["Route", "Explain", "Render"])
@pytest.mark.parametrize("prompt", [{}, {"text": "hello"}])
async def test_requests_a_second_are_bounded_on_every_path_before_any_tokens_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, prompt: dict[str, str]
) -> None:
    door = a_door(tmp_path, identity("a", limits={"requests_per_s": 2}), clock=lambda: 0.0)
    async with served("w0", door=door) as stage:
        made: list[str] = []

        async def tokens_of(ask: PromptAsk) -> PromptTokens:
            made.append(ask.model)
            return PromptTokens(1, MadeBy.ESTIMATE)

        monkeypatch.setattr(stage.texts.prompts, "tokens_of", tokens_of)
        prompts: Any = prompts_pb2_grpc.PromptsStub(stage.channel)

        async def call() -> None:
            request = asked(model="m", **prompt)
            if method == "Render":
                request = prompts_pb2.RenderRequest(model="m", text="hello")
            owner = prompts if method == "Render" else stage.router
            await getattr(owner, method)(request, metadata=bearer("a-token"))

        for _ in range(2):
            await call()
        before = len(made)
        told = await refusal(call())
        assert (told.reason, told.metadata) == ("KEY_LIMIT", {"limit": "requests_per_s"})
        assert len(made) == before


async def test_a_text_past_the_limit_of_reservations_gets_no_tokens_and_two_at_once_one_worker(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, identity("a", limits={"reservations": 1})) as stage:
        metadata = bearer("a-token")
        call = await stage.stream(asked(text="a"), asked(text="b"), metadata=metadata)
        await call.done_writing()
        codes = [result.status.code async for answer in call for result in answer.results]
        assert sorted(codes) == [0, 8]
        made = stage.texts.prompts.estimates.total()
        told = await refusal(stage.router.Route(asked(text="c"), metadata=metadata))
        assert told.metadata == {"limit": "reservations"}
        assert stage.texts.prompts.estimates.total() == made
        await stage.router.Explain(asked(text="c"), metadata=metadata)


async def test_streams_and_bytes_of_an_identity_are_bounded(tmp_path: Path) -> None:
    limits = {"streams": 1, "mib_per_s": 0.01}
    async with keyed(tmp_path, identity("a", limits=limits)) as stage:
        metadata = bearer("a-token")
        first = stage.router.RouteStream(metadata=metadata)
        await first.initial_metadata()
        watch = stage.call("WatchWorkers", metadata=metadata)
        assert (await refusal(watch.read())).metadata == {"limit": "streams"}
        for _ in range(2):
            await first.write(batch_of(asked(20_000)))

        async def read_all() -> None:
            async for _ in first:
                pass

        assert (await refusal(read_all())).metadata == {"limit": "mib_per_s"}


async def test_certificates_are_identities(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates(written(tmp_path, authority.issue(), authority))
    door = a_door(
        tmp_path,
        identity("mesh", tokens=[], certificates=["spiffe://fleet/gateway"]),
        identity("ops", tokens=[], certificates=["cn:ops"], rights=("observe",)),
        identity("token", rights=("route",)),
    )
    async with served(door=door, certificates=certificates) as stage:
        one_worker(stage.fleet)

        async def codes(pair: tuple[bytes, bytes], token: str | None = None) -> list[Code]:
            credentials = grpc.ssl_channel_credentials(authority.pem, pair[1], pair[0])
            target = f"127.0.0.1:{stage.server.port}"
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(target, credentials, options) as channel:
                found = []
                for method in ("Router/Route", "Fleet/ListWorkers"):
                    call = channel.unary_unary(f"/kvroute.v1.{method}")
                    content = asked().SerializeToString() if method == "Router/Route" else b""
                    try:
                        metadata = None if token is None else bearer(token)
                        await call(content, timeout=CALL_S, metadata=metadata)
                        found.append(Code.OK)
                    except grpc.aio.AioRpcError as error:
                        found.append(error.code())
                return found

        gateway = authority.issue("x", hosts=(), uris=["spiffe://fleet/gateway"])
        ops, other = authority.issue("ops", hosts=()), authority.issue("other", hosts=())
        assert await codes(gateway) == [Code.OK, Code.OK]
        assert await codes(ops) == [Code.PERMISSION_DENIED, Code.OK]
        assert await codes(other) == [Code.UNAUTHENTICATED] * 2
        assert await codes(other, "token-token") == [Code.OK, Code.PERMISSION_DENIED]
        assert await codes(gateway, "wrong") == [Code.UNAUTHENTICATED] * 2


async def test_without_a_key_file_a_certificate_has_all_rights(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates(written(tmp_path, authority.issue(), authority))
    door = Door(None, clock=lambda: 0.0)
    async with served(door=door, certificates=certificates) as stage:
        one_worker(stage.fleet)
        certificate, key = authority.issue("ops", hosts=())
        credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
        target = f"127.0.0.1:{stage.server.port}"
        async with KvRouteClient(target, credentials=credentials) as client:
            assert len(await client.list_workers()) == 1
            await client.drain_worker("w0")


async def test_a_unix_socket_needs_no_key_but_takes_no_wrong_one(tmp_path: Path) -> None:
    path = tmp_path / "grpc"
    settings = GrpcSettings(listen="127.0.0.1:0", unix_socket=str(path))
    async with keyed(tmp_path, identity("a", rights=("observe",)), grpc_settings=settings):
        async with KvRouteClient(f"unix:{path}") as client:
            await client.drain_worker("w0")
        async with KvRouteClient(f"unix:{path}", token="a-token") as client:
            assert len(await client.list_workers()) == 1
            with pytest.raises(PermissionDenied):
                await client.drain_worker("w0")


async def test_tokens_rotate_while_calls_go_on(tmp_path: Path) -> None:
    door = a_door(tmp_path, identity("a", tokens=[hashed("old")]))
    async with served(door=door) as stage:
        one_worker(stage.fleet)

        async def code(token: str) -> grpc.StatusCode:
            return await status_of(stage, "/kvroute.v1.Fleet/ListWorkers", token)

        assert [await code("old"), await code("new")] == [Code.OK, Code.UNAUTHENTICATED]
        write_keys(tmp_path, identity("a", tokens=[hashed("old"), hashed("new")]))
        assert door.reload()
        assert [await code("old"), await code("new")] == [Code.OK, Code.OK]
        write_keys(tmp_path, identity("a", tokens=[hashed("new")]))
        assert door.reload()
        assert [await code("old"), await code("new")] == [Code.UNAUTHENTICATED, Code.OK]
        (tmp_path / "keys.yaml").write_text("identities: 5", encoding="utf-8")
        with pytest.raises(ValueError, match="identities"):
            door.reload()
        assert await code("new") is Code.OK


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_names_its_services_to_those_that_may_observe(
    tmp_path: Path, version: str
) -> None:
    async with keyed(tmp_path, identity("a", rights=("observe",))) as stage:
        call = stage.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]),
            metadata=bearer("a-token"),
        )
        (answer,) = [answer async for answer in call]
        assert len(answer.list_services_response.service) == 6


async def test_a_command_has_its_author_in_its_message_and_in_the_audit_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvroute.audit")
    async with keyed(tmp_path, identity("ops")) as stage:
        metadata = bearer("ops-token")
        drain = fleet_pb2.DrainWorkerRequest(worker_id="w0")
        await stage.workers.DrainWorker(drain, metadata=metadata)
        remove = fleet_pb2.RemoveWorkerRequest(worker_id="w0")
        await stage.workers.RemoveWorker(remove, metadata=metadata)
        assert [control.by for control in stage.sent] == ["ops", "ops"]
    lines = [record.message for record in caplog.records if record.name == "kvroute.audit"]
    assert lines == [
        "drain worker 'w0' by 'ops': in service, 1 ranks -> drained, 1 ranks",
        "remove worker 'w0' by 'ops': drained, 1 ranks -> removed, 0 ranks",
    ]


async def test_a_call_is_let_in_by_its_headers(tmp_path: Path) -> None:
    """Nothing is kept of a stranger's call, or of one without the right, though it never ends."""
    async with keyed(tmp_path, identity("a", rights=("route",))) as stage:
        for method, needed in RIGHTS.items():
            for token in (None, "wrong", "a-token"):
                refused = needed is not None and (token != "a-token" or needed is not Right.ROUTE)
                metadata = None if token is None else bearer(token)
                call = stage.channel.stream_stream(method)(metadata=metadata, timeout=CALL_S)
                if refused:
                    assert await call.code() in REFUSED, method
                call.cancel()
        held = stage.server.connections.held
        assert held is not None
        await until(lambda: held.bytes == 0, "nothing is held")
        assert stage.server.calls == 0


async def test_a_token_of_an_issuer_whose_keys_are_not_here_yet_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = a_door(tmp_path, identity("a", rights=("route",)))
    enter = door.enter
    fetched: list[str] = []

    def unknown(token: str | None, names: Any, *, is_unix: bool) -> Any:
        raise UnknownKeyError("https://issuer.example")

    async def later(error: UnknownKeyError, token: str, names: Any) -> Any:
        fetched.append(token)
        await asyncio.sleep(0)
        return enter(token, names, is_unix=False)

    monkeypatch.setattr(door, "enter", unknown)
    monkeypatch.setattr(door, "enter_after", later)
    async with served(door=door) as stage:
        one_worker(stage.fleet)
        assert await status_of(stage, ROUTE, "a-token") is not Code.UNAUTHENTICATED
        assert await status_of(stage, ROUTE, "wrong") is Code.UNAUTHENTICATED
        assert await status_of(stage, ROUTE_STREAM, "a-token") is Code.OK
        assert await status_of(stage, ROUTE_STREAM, "wrong") is Code.UNAUTHENTICATED
        assert await status_of(stage, REPORT, "a-token") is Code.PERMISSION_DENIED
    assert fetched == ["a-token", "wrong"] * 2 + ["a-token"]
