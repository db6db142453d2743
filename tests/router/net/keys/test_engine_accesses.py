"""All callers of an engine reach it with one access: address with a path, key and certificate."""

import random
import ssl
import string
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from events.engines.access import EngineAccess
from events.engines.pages.probe import EngineHttp, EngineSilent, Probe
from events.engines.sessions import http_session
from events.plane.facts import Warm
from events.plane.settings import LOCAL_KEYS, EngineSettings, UnusableEngine, read_engine
from events.plane.supervisor import Supervisor
from events.relay.warmer import Warmer
from indexer.identity import WorkerKey
from kvroute.v1 import RegisterWorkerRequest
from router.config.keys import ConfigError
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.keys_settings import EnginesSettings
from router.gateway.exchange import Upstream
from router.gateway.server.upstreams import Seat, Upstreams
from router.net.keys.engine_accesses import EngineAccesses
from router.request import bodies
from router.request.proving.engine_tokens import EngineAway, Engines
from tests.stage.certificates import Authority

PAGES = {
    "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
    "/v1/chat/completions/render": {"token_ids": [1, 2]},
    "/v1/completions": {},
    "/v1/chat/completions": {},
}
METRICS = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_waiting{engine="0"} 0\n'


class Locked:
    """An engine that serves whom shows its key."""

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key
        self.served: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path.removeprefix(self.path)
        if request.headers.getall("Authorization", []) != [f"Bearer {self.key}"]:
            self.refused[path] += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.served[path] += 1
        if path == "/metrics":
            return web.Response(text=METRICS)
        if path not in PAGES:
            return web.Response(status=404)
        return web.json_response(PAGES[path])


@asynccontextmanager
async def locked(path: str, key: str, folder: Path) -> AsyncIterator[tuple[Locked, str]]:
    """An engine over TLS, and its base; its CA is in `ca.pem`."""
    authority = Authority()
    certificate, private = authority.issue()
    (folder / "ca.pem").write_bytes(authority.pem)
    (folder / "engine.pem").write_bytes(certificate + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "engine.pem")
    engine, app = Locked(path, key), web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    server = TestServer(app, scheme="https", host="127.0.0.1")
    await server.start_server(ssl=context)
    try:
        yield engine, f"https://127.0.0.1:{server.port}{path}"
    finally:
        await server.close()


Call = Callable[[EngineAccess], Awaitable[str]]
"""One caller's request; returns why it failed, or an empty text."""


async def probed(access: EngineAccess) -> str:
    async with http_session() as session:
        probe = Probe(session, "vllm", access)
        await probe.ask_identity()
        await probe.ask_load()
        return probe.trouble


async def identified(access: EngineAccess) -> str:
    async with http_session() as session:
        try:
            await EngineHttp(session, access).page("/v1/models")
        except EngineSilent as error:
            return str(error)
    return ""


async def rendered(access: EngineAccess) -> str:
    engines = Engines()
    try:
        await engines.ask(access, "vllm", bodies.CHAT, b"{}", "m")
    except EngineAway as error:
        return str(error)
    finally:
        await engines.close()
    return ""


async def warmed(access: EngineAccess) -> str:
    supervisor = Supervisor("test", random.Random(1))
    settings = EngineSettings(id="w", engine="vllm", address=access.base, warm=True)
    async with http_session() as session:
        warmer = Warmer(
            session,
            access,
            settings,
            WorkerKey("w", 0),
            model=lambda: "m",
            is_busy=lambda: False,
            answer=_nothing,
            counts=Counter(),
            supervisor=supervisor,
        )
        trouble = await warmer._compute(Warm(id="1", tokens=b"\1\0\0\0"))
    await supervisor.close()
    return trouble


async def _nothing(_subject: str, _data: bytes) -> bool:
    return True


async def forwarded(access: EngineAccess) -> str:
    client = {"authorization": "Bearer of-a-client", "x-api-key": "of-a-client"}
    url = access.url("/v1/chat/completions")
    async with Upstreams(GatewaySettings()) as upstreams:
        sent = upstreams.post(
            Upstream(url, access.headers(client), b"{}"),
            Seat("w", 0, "m", movable=False),
            access.tls,
        )
        async with sent as answer:
            return "" if answer.status == 200 else f"status {answer.status}"


CALLS: dict[str, Call] = {
    "relay": probed, "discovery": identified, "tokens": rendered, "warmer": warmed,
    "gateway": forwarded,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_every_caller_shows_the_engines_key_at_its_path_over_its_tls(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    key = "".join(rng.choices(string.ascii_letters + string.digits + "-._~+/=", k=1 + seed * 40))
    path = rng.choice(("", "/base", "/a/b"))
    (tmp_path / "key").write_text(f"{key}\n")
    async with locked(path, key, tmp_path) as (engine, base):
        files = EnginesSettings(
            api_key_file=str(tmp_path / "key"), ca_file=str(tmp_path / "ca.pem")
        )
        own = EngineSettings(
            id="own", engine="vllm", address=base + "/", api_key_file=files.api_key_file
        )
        keyless = EngineAccesses(EnginesSettings(ca_file=files.ca_file))
        accesses = (
            EngineAccesses(files).of_worker("any", base),
            keyless.of_engine(own),
            keyless.of_worker("own", base),  # as the gateway reaches it, by its id
        )
        for access in accesses:
            for name, call in CALLS.items():
                assert await call(access) == "", f"{name}, seed {seed}"
        assert not engine.refused
        for name, call in CALLS.items():
            trouble = await call(keyless.of_worker("other", base))
            assert "401" in trouble, name
            if name != "gateway":  # whose client has the engine's own words
                assert "the engine needs its API key: set engines.api_key_file" in trouble, name
            assert key not in trouble
        assert await CALLS["discovery"](EngineAccess(base)), "a certificate of an unknown CA"


def test_a_changed_file_counts_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.write_text("one")
    own.write_text("mine")
    accesses = EngineAccesses(EnginesSettings(api_key_file=str(shared)))
    worker = EngineSettings(id="w", engine="vllm", address="http://w", api_key_file=str(own))
    mine, others = accesses.of_engine(worker), accesses.of_worker("x", "http://x")
    assert accesses.reload() is False
    shared.write_text("")
    own.write_text("changed")
    with pytest.raises(ValueError, match="is empty"):
        accesses.reload()
    assert (mine.credentials.api_key, others.credentials.api_key) == ("changed", "one")
    shared.write_text("two")
    assert accesses.reload() is True
    assert others.headers() == {"Authorization": "Bearer two"}
    accesses.forget("w")
    assert accesses.of_worker("w", "http://w").credentials.api_key == "two"


def test_an_empty_file_of_cas_is_not_the_systems_cas(tmp_path: Path) -> None:
    file, whole = tmp_path / "ca.pem", Authority().pem
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no certificates"):
        EngineAccesses.of(EnginesSettings(ca_file=str(file)))
    file.write_bytes(whole)
    accesses = EngineAccesses(EnginesSettings(ca_file=str(file)))
    tls = accesses.of_worker("w", "https://w").tls
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no certificates"):
        accesses.reload()
    assert accesses.of_worker("w", "https://w").tls is tls
    file.write_bytes(whole)
    assert accesses.reload() is False


def test_a_worker_keeps_its_own_key_while_its_file_cannot_be_read(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.write_text("one")
    own.write_text("mine")
    accesses = EngineAccesses(EnginesSettings(api_key_file=str(shared)))
    worker = EngineSettings(id="w", engine="vllm", address="http://w", api_key_file=str(own))
    accesses.of_engine(worker)
    own.unlink()
    with pytest.raises(OSError, match="No such file"):
        accesses.of_engine(worker)
    assert accesses.of_worker("w", "http://w").credentials.api_key == "mine"
    accesses.of_engine(EngineSettings(id="w", engine="vllm", address="http://w"))
    assert accesses.of_worker("w", "http://w").credentials.api_key == "one"


def test_settings_that_contradict_or_cannot_be_read_name_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k")
    for engines, gateway, told in (
        (EnginesSettings(api_key_file=str(file)), GatewaySettings(pass_keys=True), "pass_keys"),
        (EnginesSettings(api_key_file=str(tmp_path / "no")), None, r"engines\.api_key_file"),
        (EnginesSettings(ca_file=str(file)), None, "holds no certificates"),
    ):
        with pytest.raises(ConfigError, match=told):
            EngineAccesses.of(engines, gateway)
    worker = EngineSettings(id="w", engine="vllm", address="a", ca_file=str(tmp_path / "no"))
    with pytest.raises(ConfigError, match=r"worker 'w': .*No such file"):
        EngineAccesses.of(EnginesSettings(), workers=[worker])


def test_no_caller_and_no_pod_can_name_a_file() -> None:
    assert not set(LOCAL_KEYS) & set(RegisterWorkerRequest.DESCRIPTOR.fields_by_name)
    from router.cluster.discovery.pods import _read

    for key in LOCAL_KEYS:
        with pytest.raises(UnusableEngine, match="no such annotation"):
            _read(key, "/etc/shadow")
    assert read_engine({"id": "w", "engine": "vllm", "address": "http://a"}).api_key_file is None
