"""A gateway with keys: which clients it serves, and what workers and the router see of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.config.keys import ConfigError
from router.config.settings.keys_settings import DialSettings, EnginesSettings
from router.gateway.server.entrance import CREDENTIALS
from router.net.keys.dialing import dial_options, token_file
from router.net.keys.engine_accesses import EngineAccesses
from router.net.keys.followed import FOLLOW_S
from tests.router.gateway.server.test_gateway import BODY, CHAT
from tests.stage.certificates import Authority, written
from tests.stage.gateway import Stage, Worker, a_gateway, answering
from tests.stage.keys import a_door, identity

DONE = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'


async def chat(stage: Stage, headers: dict[str, str] | None = None, **fields: Any) -> int:
    return int((await stage.ask(CHAT, BODY | fields, headers=headers)).status)


def requests_of(stage: Stage) -> list[Any]:
    """The requests that come to the router from now on."""
    admission, seen = stage.served.desk.admission, list[Any]()
    admit = admission.route

    def spy(request: Any, *rest: Any, **named: Any) -> Any:
        seen.append(request)
        return admit(request, *rest, **named)

    admission.route = spy  # type: ignore[method-assign]
    return seen


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_only_clients_with_a_key_are_served_and_workers_never_see_it(tmp_path: Path) -> None:
    worker = Worker(answering(DONE))
    async with a_gateway(worker, door=a_door(tmp_path, identity("a", rights=("route",)))) as stage:
        assert await chat(stage, bearer("a-token")) == 200
        others = dict.fromkeys(CREDENTIALS[1:], "secret") | {"x-api-key": "a-token"}
        assert await chat(stage, others) == 200  # Anthropic's clients
        for headers in (None, bearer("wrong"), {"Authorization": "Basic YTpi"}):
            answer = await stage.ask(CHAT, BODY, headers=headers)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            error = answer.error
            assert error["message"] == "the call has no valid key"
            assert error["code"] == "invalid_api_key"
        assert len(worker.requests) == 2
        for request in worker.requests:
            assert not set(CREDENTIALS) & set(request.headers)
        assert (
            stage.sample("kvroute_refusals_total", program="gateway", reason="UNAUTHENTICATED") == 3
        )


async def test_keys_go_on_to_workers_only_if_configured(tmp_path: Path) -> None:
    worker = Worker(answering(DONE))
    async with a_gateway(worker, door=a_door(tmp_path, identity("a")), pass_keys=True) as stage:
        assert await chat(stage, bearer("a-token") | {"Cookie": "a=b"}) == 200
    (request,) = worker.requests
    assert request.headers["Authorization"] == "Bearer a-token"
    assert "Cookie" not in request.headers


async def test_without_keys_of_its_own_a_gateway_passes_them_on() -> None:
    worker = Worker(answering(DONE))
    async with a_gateway(worker) as stage:
        assert await chat(stage, bearer("the-engines-key")) == 200
    (request,) = worker.requests
    assert request.headers["Authorization"] == "Bearer the-engines-key"


async def test_rights_models_and_limits_are_those_of_the_key(tmp_path: Path) -> None:
    door = a_door(
        tmp_path,
        identity("a", models=["m"]),
        identity("b", models=["other"]),
        identity("c", rights=("observe",)),
        identity("d", limits={"requests_per_s": 0.001}),
        identity("e", rights=("route",)),
    )
    async with a_gateway(Worker(answering(DONE)), door=door) as stage:
        assert await chat(stage, bearer("a-token")) == 200
        assert await chat(stage, bearer("b-token")) == 403
        assert await chat(stage, bearer("c-token")) == 403
        assert await chat(stage, bearer("d-token")) == 200
        answer = await stage.ask(CHAT, BODY, headers=bearer("d-token"))
        assert answer.status == 429
        assert int(answer.headers["Retry-After"]) >= 1
        for token, models in (("a", ["m"]), ("b", [])):
            url = f"{stage.base}/v1/models"
            async with stage.http.get(url, headers=bearer(f"{token}-token")) as answer:
                assert [card["id"] for card in (await answer.json())["data"]] == models
            async with stage.http.get(f"{url}/m", headers=bearer(f"{token}-token")) as answer:
                assert answer.status == (200 if models else 404)
        assert (await stage.get("/v1/models")).status == 401
        for path in ("health", "ready"):
            assert (await stage.get(f"/{path}")).status == 200
        url = f"{stage.base}/metrics"
        for headers, status in ((None, 401), (bearer("e-token"), 403), (bearer("c-token"), 200)):
            async with stage.http.get(url, headers=headers) as answer:
                assert answer.status == status


async def test_the_tenant_of_the_key_reaches_the_router(tmp_path: Path) -> None:
    door = a_door(tmp_path, identity("a", tenant="acme"), identity("b"))
    worker = Worker(answering(DONE))
    async with a_gateway(worker, door=door) as stage:
        requests = requests_of(stage)
        for token in ("a-token", "b-token"):
            assert await chat(stage, bearer(token) | {"X-Tenant-Id": "other"}) == 200
        workers = [one.headers["X-Tenant-Id"] for one in worker.requests]
    assert [one.tenant for one in requests] == workers == ["acme", "other"]


async def test_a_field_of_the_engines_plane_is_refused_by_its_name(tmp_path: Path) -> None:
    worker = Worker(answering(DONE))
    may = identity("b", rights=("route", "engine_fields"))
    async with a_gateway(worker, door=a_door(tmp_path, identity("a"), may)) as stage:
        fields = {"bootstrap_host": "10.0.0.1", "bootstrap_room": 7}
        answer = await stage.ask(CHAT, BODY | fields, headers=bearer("a-token"))
        assert answer.status == 403
        assert "bootstrap_host" in answer.error["message"]
        assert await chat(stage, bearer("a-token"), lora_path="secret") == 200, "all models"
        assert await chat(stage, bearer("b-token"), **fields) == 200
        await stage.until(lambda: stage.open == 0)
    assert len(worker.bodies) == 2


async def test_a_salt_by_tenant_reaches_the_router_and_the_engine(tmp_path: Path) -> None:
    door = a_door(tmp_path, identity("a", tenant="acme"), identity("b"), identity("c"))
    worker = Worker(answering(DONE))
    cases = [("a", {}), ("b", {}), ("c", {}), ("a", {"cache_salt": "x"}), ("b", {"cache_salt": ""})]
    async with a_gateway(worker, door=door, salt="tenant") as stage:
        for token, fields in cases:
            assert await chat(stage, bearer(f"{token}-token"), **fields) == 200
    salts = [json.loads(sent)["cache_salt"] for sent in worker.bodies]
    assert len(set(salts[:4])) == 4
    assert salts[4] == salts[1], "an empty salt is none"
    assert {len(salt) for salt in salts} == {64}


async def test_a_response_goes_on_for_its_tenant_alone(tmp_path: Path) -> None:
    door = a_door(
        tmp_path,
        identity("a", tenant="acme"),
        identity("a2", tenant="acme"),
        identity("b", tenant="other"),
        identity("c"),
    )
    said = b'{"id": "resp_1", "object": "response", "status": "completed", "output": []}'
    worker = Worker(answering(said))
    body = {"model": "m", "input": "hello"}
    async with a_gateway(worker, door=door) as stage:

        async def asks(token: str, previous: str | None) -> int:
            about = {} if previous is None else {"previous_response_id": previous}
            headers = bearer(f"{token}-token")
            answer = await stage.ask("/v1/responses", body | about, headers=headers)
            if answer.status == 404:
                assert answer.headers["X-Kvroute-Reason"] == "RESPONSE_GONE"
            return int(answer.status)

        assert await asks("a", None) == 200
        assert [await asks(token, "resp_1") for token in ("a", "a2", "b", "c")] == [
            200,
            200,
            404,
            404,
        ]
        assert await asks("a", "resp_of_another_gateway") == 404, "whose it is nobody knows"
        assert await asks("b", None) == 200, "the engine gives an id twice"
        assert [await asks(token, "resp_1") for token in ("a", "b")] == [200, 404]


async def test_a_gateway_brings_the_router_its_own_token(tmp_path: Path) -> None:
    keys = a_door(tmp_path, identity("gateway", rights=("route", "report", "observe")))
    file = tmp_path / "token"
    file.write_text("gateway-token\n", encoding="utf-8")
    dial = dial_options(DialSettings(token_file=str(file)), lambda: 0.0)
    worker = Worker(answering(DONE))
    async with a_gateway(worker, router_door=keys, dial=dial) as stage:
        assert await chat(stage) == 200
    (request,) = worker.requests
    assert "Authorization" not in request.headers


def test_a_token_file_is_read_again_and_kept_while_it_is_broken(tmp_path: Path) -> None:
    file, now_s = tmp_path / "token", [0.0]
    file.write_text("one\n", encoding="utf-8")
    token = token_file(str(file), lambda: now_s[0])
    file.write_text("two", encoding="utf-8")
    assert token() == "one"
    for text, expected in (("two", "two"), ("", "two"), ("three", "three")):
        file.write_text(text, encoding="utf-8")
        now_s[0] += FOLLOW_S
        assert token() == expected


def test_a_wrong_way_to_dial_is_refused_with_its_file(tmp_path: Path) -> None:
    pair = written(tmp_path, Authority().issue())
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n")
    for settings, sentence in (
        (DialSettings(ca_file="/no/such"), "/no/such: No such file"),
        (DialSettings(token_file=str(empty)), "is empty"),
        (DialSettings(certificate_file=pair.certificate_file), "needs its key"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            dial_options(settings, lambda: 0.0)


@pytest.mark.parametrize("keyed", [True, False])
async def test_workers_get_the_gateways_own_key_in_the_place_of_a_clients(
    tmp_path: Path, keyed: bool
) -> None:
    file = tmp_path / "engine.key"
    file.write_text("first\n")
    worker = Worker(answering(DONE))
    door = a_door(tmp_path, identity("a")) if keyed else None
    async with a_gateway(
        worker, door=door, engines=EnginesSettings(api_key_file=str(file))
    ) as stage:
        assert await chat(stage, bearer("a-token")) == 200
        assert await chat(stage, {"x-api-key": "a-token"}) == 200
        file.write_text("second\n")
        stage.gateway._followed.look()
        assert await chat(stage, bearer("a-token")) == 200
        file.write_text("")
        stage.gateway._followed.look()
        assert await chat(stage, bearer("a-token")) == 200
        assert stage.sample("kvroute_reads_total", source="engine_key", result="failed") == 1
        assert stage.sample("kvroute_reads_total", source="engine_key", result="ok") == 1
    shown = [request.headers.getall("Authorization") for request in worker.requests]
    assert shown == [["Bearer first"], ["Bearer first"], ["Bearer second"], ["Bearer second"]]
    assert not any("X-Api-Key" in request.headers for request in worker.requests)


async def test_a_key_for_engines_that_can_not_be_used_stops_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"No such file.*engines\.api_key_file"):
        async with a_gateway(engines=EnginesSettings(api_key_file=missing)):
            pass
    (tmp_path / "key").write_text("k")
    engines = EnginesSettings(api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match=r"either .*pass_keys"):
        async with a_gateway(engines=engines, pass_keys=True):
            pass


async def test_a_worker_without_the_model_has_its_list_read_again() -> None:
    lacks = answering(b'{"error": {"message": "The model `m` does not exist."}}', status=404)
    worker, read_again = Worker(lacks), list[str]()
    accesses = EngineAccesses()
    accesses.on_model_missing = read_again.append
    async with a_gateway(worker, accesses=accesses) as stage:
        assert await chat(stage, {}) == 404
        worker.play = answering(b"{}", status=404)
        assert await chat(stage, {}) == 404
        worker.play = answering(DONE)
        assert await chat(stage, {}) == 200
    assert read_again == ["w0"]


async def test_an_adapter_behind_a_colon_is_no_model_that_a_worker_serves(tmp_path: Path) -> None:
    worker = Worker(answering(DONE))
    door = a_door(tmp_path, identity("a", models=["m*"]))
    async with a_gateway(worker, door=door) as stage:
        assert await chat(stage, bearer("a-token"), model="m") == 200
        assert await chat(stage, bearer("a-token"), model="m:secret") == 404, "SGLang's form"
    assert len(worker.bodies) == 1
