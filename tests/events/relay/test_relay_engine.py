"""A relay and an engine that is slow, gone, hostile, or behind a redirect."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from events.engines import sockets as engine_sockets
from events.engines.access import PAGE_S, EngineAccess
from events.plane import supervisor
from events.plane.facts import Heartbeat, Warm, Warmed, decode, encode
from events.plane.settings import EngineSettings
from events.relay import engine_pages, stream_publisher, warmer
from events.relay import relay as module
from events.relay.engine_pages import HEALTH_S
from events.relay.rank import EngineState
from events.relay.relay import Relay
from tests.events.relay.one_rank import stored
from tests.stage.waiting import free_port, repeated, until
from tests.stage.wire import Wire


def page_of(first: int, ranks: int) -> str:
    """The metrics of a node whose engine numbers its ranks from `first` on."""
    return "".join(
        f'vllm:num_requests_running{{engine="{first + rank}",model_name="m"}} {rank + 1}\n'
        f'vllm:num_requests_waiting{{engine="{first + rank}",model_name="m"}} 0\n'
        for rank in range(ranks)
    )


FOUR_RANKS, ONE_RANK = page_of(0, 4), page_of(0, 1)


class Engine:
    """An engine's HTTP api, and a relay on a broker in memory."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wire = Wire()
        self.relay: Relay | None = None
        self.asked: list[str] = []
        self.pages: dict[str, Callable[[], Awaitable[web.Response]]] = {
            "/v1/models": self.says(web.json_response, {"data": [{"id": "m"}]}),
            "/metrics": self.says(web.Response, text=ONE_RANK),
        }
        self.hanging = asyncio.Event()
        """Set: pages that hang are let go."""
        self.page_s = 60.0
        """Longest wait for a page."""
        self._runner: web.AppRunner | None = None
        self.port = 0

    @staticmethod
    def says(
        response: Callable[..., web.Response], *args: object, **kwargs: object
    ) -> Callable[[], Awaitable[web.Response]]:
        async def page() -> web.Response:
            return response(*args, **kwargs)

        return page

    async def hangs(self) -> web.Response:
        await self.hanging.wait()
        return web.Response()

    async def listen(self) -> None:
        async def page(request: web.Request) -> web.Response:
            self.asked.append(request.path)
            answer = self.pages.get(request.path)
            return web.Response(status=404) if answer is None else await answer()

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", page)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def leave(self) -> None:
        """Nothing listens at the port any more."""
        self.hanging.set()
        assert self._runner is not None
        await self._runner.cleanup()

    async def follow(self, own_numbers: Mapping[str, str] | None = None, **fields: object) -> Relay:
        settings = msgspec.structs.replace(
            EngineSettings(id="w", engine="vllm", address=f"http://127.0.0.1:{self.port}"),
            **fields,
        )
        self.relay = Relay(
            settings,
            self.wire,
            fleet="f",
            clock=lambda: self.now_s,
            rng=random.Random(1),
            access=EngineAccess(settings.http or "", timeout_s=self.page_s),
            own_numbers=own_numbers or {},
        )
        await self.relay.start()
        return self.relay

    async def heard(self, wanted: Callable[[Heartbeat], object], told: str) -> Heartbeat:
        """The worker's heartbeat, once it is such a one."""
        await until(lambda: any(map(wanted, self.wire.heartbeats("w")[-1:])), told)
        return self.last()

    def last(self) -> Heartbeat:
        return self.wire.heartbeats("w")[-1]

    async def relay_says(self, *, healthy: bool) -> None:
        await self.heard(lambda one: one.healthy is healthy, f"a heartbeat with healthy={healthy}")

    async def warned(self, words: str, told: str = "a warning") -> Heartbeat:
        return await self.heard(lambda one: words in "\n".join(one.warnings), told)

    def warnings(self) -> str:
        heartbeats = self.wire.heartbeats("w")
        return "\n".join(heartbeats[-1].warnings) if heartbeats else ""


@pytest.fixture
def seldom_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes, comes for its own reason."""
    monkeypatch.setattr(stream_publisher, "BEAT_S", 60.0)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.001)
    monkeypatch.setattr(engine_pages, "PROBE_S", 0.01)
    monkeypatch.setattr(engine_pages, "MODELS_S", 0.02)
    monkeypatch.setattr(engine_pages, "IDENTITY_S", 0.02)
    engine = Engine()
    await engine.listen()
    yield engine
    if engine.relay is not None:
        await engine.relay.stop()
    await engine.leave()


async def test_load_is_read_while_the_identity_hangs(engine: Engine) -> None:
    relay = await engine.follow()
    await engine.relay_says(healthy=True)
    engine.pages["/v1/models"] = engine.hangs
    await until(lambda: engine.asked[-4:] == ["/metrics"] * 4, "the identity to hang")
    engine.now_s += 10 * HEALTH_S
    await until(lambda: relay._pages.answered_at_s == engine.now_s, "load to count as an answer")
    await engine.relay_says(healthy=True)


async def test_an_identity_that_is_told_counts_as_an_answer_while_load_hangs(
    engine: Engine,
) -> None:
    relay = await engine.follow()
    await engine.relay_says(healthy=True)
    engine.pages["/metrics"] = engine.hangs
    await until(lambda: "/metrics" not in engine.asked[-9:], "the load to hang")
    engine.now_s += 10 * HEALTH_S
    await until(lambda: relay._pages.answered_at_s == engine.now_s, "the identity to count")


async def test_a_bootstrap_server_that_hangs_costs_nothing(engine: Engine) -> None:
    engine.pages["/query"] = engine.hangs
    await engine.follow(
        kv_connector="MooncakeConnector", bootstrap_host="127.0.0.1", bootstrap_port=engine.port
    )
    await engine.heard(
        lambda one: (one.model, one.running, one.healthy) == ("m", 1, True), "identity and load"
    )
    assert "/query" in engine.asked


@pytest.mark.usefixtures("seldom_beats")
async def test_a_refused_connection_and_the_next_answer_are_told_at_once(engine: Engine) -> None:
    engine.page_s = PAGE_S
    await engine.follow()
    await engine.relay_says(healthy=True)
    # The clock stands still: it is not the time without an answer that is told.
    await engine.leave()
    await engine.relay_says(healthy=False)
    await engine.listen()
    await engine.relay_says(healthy=True)


@pytest.mark.usefixtures("seldom_beats")
async def test_each_sample_of_the_load_makes_a_heartbeat(engine: Engine) -> None:
    await engine.follow()
    await engine.relay_says(healthy=True)
    for _ in range(3):
        engine.now_s += 1.0
        await engine.heard(
            lambda one: one.sampled_at_s == one.sent_at_s == engine.now_s, "a new sample"
        )


@pytest.mark.usefixtures("seldom_beats")
async def test_until_its_first_probe_has_ended_an_engine_counts_as_not_probed(
    engine: Engine,
) -> None:
    engine.pages = dict.fromkeys(engine.pages, engine.hangs)
    await engine.follow()
    first = await engine.heard(lambda _: True, "a heartbeat")
    assert (first.healthy, first.probed) == (False, False)
    engine.hanging.set()  # pages without a word
    last = await engine.heard(lambda one: one != first, "the end of the first probe")
    assert (last.healthy, last.probed) == (False, True)


async def test_ranks_that_are_not_as_configured_are_a_warning(engine: Engine) -> None:
    engine.pages["/metrics"] = engine.says(web.Response, text=FOUR_RANKS)
    await engine.follow()
    last = await engine.warned("4 data-parallel ranks")
    assert last.warning_codes == ("ranks",)
    engine.pages["/metrics"] = engine.says(web.Response, text=ONE_RANK)
    await until(lambda: not engine.warnings(), "no warning")


async def test_events_of_another_rank_are_a_warning(
    engine: Engine, publisher: "Publisher", monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.pages["/metrics"] = engine.says(web.Response, text=FOUR_RANKS)
    port = int(publisher.events.rpartition(":")[2])
    monkeypatch.setattr(module, "rank_endpoint", lambda *_: f"tcp://127.0.0.1:{port}")
    relay = await engine.follow(events=publisher.events, ranks=4)
    batch = msgspec.msgpack.encode([0.0, [], 2])
    await repeated(
        lambda: publisher.publish(payload=batch),
        lambda: all(shell.rank.engine_rank is not None for shell in relay._shells),
        "every rank's number",
    )

    def warned(rank: int) -> bool:
        heartbeats = engine.wire.heartbeats("w", rank)
        return bool(heartbeats) and "ranks" in heartbeats[-1].warning_codes

    for rank in (0, 1, 3):
        await until(lambda r=rank: warned(r), f"a warning of rank {rank}")  # type: ignore[misc]
    assert not warned(2)


@pytest.mark.parametrize("seed", range(6))
async def test_the_ranks_of_a_groups_second_node_are_its_own_from_0_on(
    engine: Engine, publisher: "Publisher", seed: int
) -> None:
    rng = random.Random(seed)
    first, ranks = rng.randrange(1, 64), rng.randrange(1, 5)
    engine.pages["/metrics"] = engine.says(web.Response, text=page_of(first, ranks))
    heard = rng.randrange(ranks)
    port = int(publisher.events.rpartition(":")[2]) - first - heard
    relay = await engine.follow(
        events=f"tcp://127.0.0.1:{port}", ranks=ranks, first_rank=first, kv_engine_id="e"
    )
    batch = msgspec.msgpack.encode([0.0, [], first + heard])
    shell = relay._shells[heard]
    await repeated(
        lambda: publisher.publish(payload=batch),
        lambda: shell.rank.engine_rank is not None,
        "the rank's number",
    )

    def running() -> list[int]:
        beats = [engine.wire.heartbeats("w", rank) for rank in range(ranks)]
        return [beat[-1].running for beat in beats if beat and not beat[-1].warning_codes]

    await until(lambda: running() == list(range(1, ranks + 1)), f"loads, seed {seed}")
    assert [key.dp_rank for key, _ in relay.ranks] == list(range(ranks))
    names = [engine.wire.heartbeats("w", rank)[-1].kv_engine_id for rank in range(ranks)]
    assert names == [f"e_dp{first + rank}" for rank in range(ranks)]


async def test_ranks_that_are_numbered_from_another_on_are_a_warning_with_the_number(
    engine: Engine,
) -> None:
    engine.pages["/metrics"] = engine.says(web.Response, text=page_of(8, 4))
    await engine.follow(ranks=4)
    await engine.warned("numbers its ranks from 8 on, and first_rank is 0")


async def test_a_single_rank_has_its_load_whatever_its_number(engine: Engine) -> None:
    engine.pages["/metrics"] = engine.says(web.Response, text=page_of(3, 1))
    await engine.follow()
    await engine.heard(lambda one: one.running == 1, "the load")
    assert not engine.warnings()


async def test_own_numbers_are_in_the_heartbeats_of_their_ranks_while_the_engine_answers(
    engine: Engine,
) -> None:
    def said() -> list[dict[str, float]]:
        beats = [engine.wire.heartbeats("w", rank) for rank in range(2)]
        return [beat[-1].own_numbers if beat else {} for beat in beats]

    def page(*lines: str) -> Callable[[], Awaitable[web.Response]]:
        return engine.says(web.Response, text=page_of(0, 2) + "".join(f"{s}\n" for s in lines))

    engine.pages["/metrics"] = page("room 21", 'chip{engine="1"} -4', "other 5")
    await engine.follow({"room_celsius": "room", "chip_celsius": "chip"}, ranks=2, model="m")
    both = [{"room_celsius": 21.0}, {"room_celsius": 21.0, "chip_celsius": -4.0}]
    await until(lambda: said() == both, "both ranks' numbers")
    engine.pages["/metrics"] = page("room NaN", 'chip{engine="1"} 0')
    await until(lambda: said() == [{}, {"chip_celsius": 0.0}], "those that are there now")
    await engine.leave()  # as an engine that restarts
    await until(lambda: said() == [{}, {}], "none of an engine that is away")
    engine.pages["/metrics"] = page("room 22")
    await engine.listen()
    await until(lambda: said() == [{"room_celsius": 22.0}] * 2, "those of its next life")
    engine.pages["/metrics"] = engine.says(web.Response, text="up 1\n")
    await until(engine.warnings, "a page without a load")
    engine.now_s += HEALTH_S
    await until(lambda: said() == [{}, {}], "none that is old, of an engine that lives")
    assert engine.last().healthy


async def test_an_engine_with_a_feed_of_loads_has_its_own_numbers_by_its_pages(
    engine: Engine,
) -> None:
    load = {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 0}
    engine.pages["/server_info"] = engine.says(web.json_response, {"page_size": 16})
    engine.pages["/v1/loads"] = engine.says(web.json_response, {"loads": [load]})
    engine.pages["/metrics"] = engine.says(web.Response, text="room 21\n")
    feed = f"tcp://127.0.0.1:{free_port()}"
    await engine.follow({"room_celsius": "room"}, engine="sglang", load=feed)
    said = {"room_celsius": 21.0}
    last = await engine.heard(lambda one: one.own_numbers == said, "its number")
    assert last.running == 0, "its load is the feed's, which has said nothing"


async def test_redirects_are_told_and_not_followed(engine: Engine) -> None:
    to = f"http://user:hunter2@127.0.0.1:{engine.port}/elsewhere"
    for path in ("/v1/models", "/metrics", "/v1/completions"):
        engine.pages[path] = engine.says(web.Response, status=307, headers={"Location": to})
    await engine.follow(warm=True)
    await engine.warned("answered with a redirect to")
    assert "name the engine's own address" in engine.warnings()
    assert "hunter2" not in engine.warnings()
    await engine.wire.say("kvroute.v1.f.warm.w.0", encode(Warm(id="1", tokens=bytes(4))), "us")
    await until(lambda: engine.wire.published["us"], "an answer to the router")
    told = decode(Warmed, engine.wire.published["us"][0])
    assert isinstance(told, Warmed)
    assert not told.done
    assert "answered with a redirect to http://***@127.0.0.1" in told.detail
    assert "/elsewhere" not in engine.asked


def sleep_page(level: int | None) -> str:
    """level: at which it sleeps; None: it is awake."""
    states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
    return ONE_RANK + "".join(
        f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {value:.1f}\n'
        for name, value in states.items()
    )


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_sleeps_is_said_to_and_holds_no_blocks(
    engine: Engine, level: int
) -> None:
    engine.pages["/metrics"] = engine.says(web.Response, text=sleep_page(None))
    relay = await engine.follow()
    await engine.relay_says(healthy=True)
    (shell,) = relay._shells
    shell.rank.on_message(0, stored(1), 0.0)
    shell.rank.complete = True
    position, blocks = shell.rank.position, len(shell.rank.ledger)
    assert blocks

    async def becomes(healthy: bool, asleep: bool, told: str) -> None:
        await engine.heard(lambda one: (one.healthy, one.asleep) == (healthy, asleep), told)

    engine.pages["/metrics"] = engine.says(web.Response, text=sleep_page(level))
    await becomes(False, True, "a heartbeat of a sleeping engine")
    await until(lambda: not len(shell.rank.ledger), "its blocks to be forgotten")
    assert shell.rank.complete
    assert shell.rank.position != position, "the saved ledger, too"
    shell.rank.on_message(1, stored(2), 0.0)  # was under way as it fell asleep
    await until(lambda: not len(shell.rank.ledger), "a late block to be forgotten")
    engine.pages["/metrics"] = engine.says(web.Response, text=sleep_page(None))
    await becomes(True, False, "a heartbeat of an engine that is awake")
    shell.rank.on_message(2, stored(3), 0.0)
    asked = len(engine.asked)
    await until(lambda: len(engine.asked) > asked + 8, "further pages")
    assert len(shell.rank.ledger)
    await engine.leave()  # as a pod that is deleted while it sleeps
    await becomes(False, False, "a heartbeat of an engine that is gone")


async def test_an_engine_that_sleeps_at_level_0_keeps_its_blocks(engine: Engine) -> None:
    engine.pages["/metrics"] = engine.says(web.Response, text=sleep_page(None))
    relay = await engine.follow()
    await engine.relay_says(healthy=True)
    (shell,) = relay._shells
    shell.rank.on_message(0, stored(1), 0.0)
    blocks = len(shell.rank.ledger)
    engine.pages["/metrics"] = engine.says(web.Response, text=sleep_page(0))
    await engine.heard(lambda one: one.asleep, "a heartbeat of its sleep")
    asked = len(engine.asked)
    await until(lambda: len(engine.asked) > asked + 8, "further pages")
    assert len(shell.rank.ledger) == blocks > 0
    assert not engine.last().healthy


async def test_its_models_are_read_at_once_on_request_and_the_rest_seldom(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pages, "MODELS_S", 600.0)
    monkeypatch.setattr(engine_pages, "IDENTITY_S", 600.0)
    engine.pages["/version"] = engine.says(web.json_response, {"version": "0.32.0"})
    relay = await engine.follow()
    await engine.relay_says(healthy=True)
    loras = [{"id": "m"}, {"id": "l", "parent": "m"}]
    engine.pages["/v1/models"] = engine.says(web.json_response, {"data": loras})
    relay.look_at_models()
    await engine.heard(lambda one: one.lora_names == ("l",), "the LoRA")
    for _ in range(100):  # as many 404 as there are requests
        relay.look_at_models()
    asked = engine.asked.count("/metrics")
    await until(lambda: engine.asked.count("/metrics") > asked + 5, "further pages")
    assert engine.asked.count("/v1/models") < 8
    assert engine.asked.count("/version") == 1


async def test_a_page_that_says_nothing_is_requested_ever_more_seldom(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pages, "BACKOFF_MAX_S", 0.08)
    waits: list[float] = []
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(engine_pages, "sleep", slept)
    engine.pages["/metrics"] = engine.says(web.Response, text="up 1\n" * 9000)
    await engine.follow()
    await engine.relay_says(healthy=True)

    def after(kind: float) -> list[float]:
        return [wait for wait in waits if wait >= kind]

    await until(lambda: len(after(0.08)) >= 2, "the longest interval")
    assert after(0.02)[:4] == [0.02, 0.04, 0.08, 0.08]
    await engine.warned("lacks vllm:num_requests_running")
    engine.pages["/metrics"] = engine.says(web.Response, text=ONE_RANK)
    await until(lambda: not engine.warnings(), "a page with its load")
    rest = len(waits)
    await until(lambda: len(waits) >= rest + 5, "the usual interval, less what a reading takes")
    assert not [wait for wait in waits[rest + 1 :] if wait > 0.01]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_configured_model_is_served_without_a_list_of_models(
    engine: Engine, status: int
) -> None:
    engine.pages["/v1/models"] = engine.says(web.Response, status=status)
    engine.pages["/metrics"] = engine.says(web.Response, status=status)
    await engine.follow(model="mine")
    await engine.relay_says(healthy=True)
    assert engine.last().model == "mine"
    await engine.warned(f"status {status}")
    assert ("the engine needs its API key: set engines.api_key_file" in engine.warnings()) == (
        status != 404
    )


async def test_without_a_configured_model_an_engine_that_lists_none_serves_none(
    engine: Engine,
) -> None:
    for path in ("/v1/models", "/metrics"):
        engine.pages[path] = engine.says(web.Response, status=401)
    await engine.follow()
    last = await engine.warned("status 401")
    assert not last.healthy


async def test_a_prefix_that_is_taken_back_at_once_frees_its_place(engine: Engine) -> None:
    engine.pages["/v1/completions"] = engine.says(web.json_response, {})
    await engine.follow(warm=True)
    subject = "kvroute.v1.f.warm.w.0"
    for number in range(warmer.JOBS_MAX + 1):  # each pair with no turn of the event loop between
        prefix = bytes([number, 0, 0, 0])
        await engine.wire.say(subject, encode(Warm(id=str(number), tokens=prefix)), "taken_back")
        await engine.wire.say(subject, encode(Warm(id=str(number), cancel=True)), "")
    await engine.wire.say(subject, encode(Warm(id="again", tokens=bytes(4))), "us")
    await until(lambda: engine.wire.published["us"], "an answer to the router")
    told = decode(Warmed, engine.wire.published["us"][0])
    assert isinstance(told, Warmed)
    assert (told.id, told.done) == ("again", True)
    assert not engine.wire.published["taken_back"]


async def test_passwords_are_in_the_address_and_nowhere_else(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    engine.pages["/metrics"] = engine.says(web.Response, status=500)
    address = f"http://user:hunter2@127.0.0.1:{engine.port}"
    await engine.follow(address=address, metrics=address + "/x:y", events="tcp://user:hunter2@h:1")
    await engine.warned("the engine's HTTP", "a warning of the probe")
    last = await engine.warned("fails at events", "a warning of the events")
    assert last.address == address
    assert "hunter2" not in engine.warnings()
    assert "hunter2" not in caplog.text


class Publisher:
    """An engine's ZMQ sockets."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self.live = self._context.socket(zmq.PUB)
        self.replay = self._context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self.live.bind_to_random_port('tcp://127.0.0.1')}"
        self.replays = f"tcp://127.0.0.1:{self.replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.sequence = 0

    async def publish(self, size: int = 0, payload: bytes | None = None) -> None:
        batch = bytes(size) if payload is None else payload
        await self.live.send_multipart([b"", self.sequence.to_bytes(8, "big"), batch])
        self.sequence += 1

    async def drip(self, until_done: Callable[[], object]) -> None:
        """Answers a replay with a message now and then, for ever."""
        asker, *_ = await self.replay.recv_multipart()
        number = 0
        async with asyncio.timeout(60):
            while not until_done():
                await self.replay.send_multipart([asker, b"", number.to_bytes(8, "big"), b""])
                number += 1
                await asyncio.sleep(0.005)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.close()


async def test_a_replay_that_drips_ends_at_its_time_and_live_events_count(
    engine: Engine, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "REPLAY_S", 0.3)
    relay = await engine.follow(events=publisher.events, replay=publisher.replays)
    rank = relay._shells[0].rank
    await publisher.drip(lambda: relay.counts["replay_too_slow"])
    await until(lambda: rank.state is EngineState.FOLLOWING, "the rank to follow")
    assert not rank.complete
    assert relay.counts["replay_timeout"] == 0
    publisher.sequence = rank._next_seq
    async with asyncio.timeout(60):
        while rank._next_seq < publisher.sequence or rank._next_seq < 1000:
            publisher.sequence = max(publisher.sequence, 1000)
            await publisher.publish()
            await asyncio.sleep(0.005)


async def test_a_frame_over_the_bound_costs_its_connection_and_another_is_made(
    engine: Engine, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "FRAME_BYTES_MAX", 1000)
    monkeypatch.setattr(engine_sockets, "_RETRY_S", 0.05)
    relay = await engine.follow(events=publisher.events)
    rank = relay._shells[0].rank

    async def heard_after(first: int) -> None:
        publisher.sequence = first
        await repeated(
            lambda: publisher.publish(1000), lambda: rank._next_seq > first, "what is published"
        )

    await heard_after(10)
    assert not relay.failures
    await publisher.publish(1001)
    await until(lambda: relay.failures["events"], "the connection to be given up")
    await heard_after(1_000_000)
    await engine.warned("more than 1000 bytes")


async def test_a_publisher_that_comes_back_is_followed_by_the_same_socket(
    engine: Engine, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "_RETRY_S", 1.0)
    relay = await engine.follow(events=publisher.events)
    rank = relay._shells[0].rank
    for _ in range(2):
        first = rank._next_seq
        async with asyncio.timeout(60):
            while rank._next_seq == first:
                publisher.sequence = max(publisher.sequence, first)
                await publisher.publish()
                await asyncio.sleep(0.005)
        publisher.live.close(linger=0)
        publisher.live = publisher._context.socket(zmq.PUB)

        def bound() -> bool:
            try:
                publisher.live.bind(publisher.events)
            except zmq.ZMQError:
                return False
            return True

        await until(bound, "the port")
    assert not relay.failures


@pytest.mark.parametrize("total_blocks", [None, 100])
async def test_blocks_that_no_page_has_are_those_of_the_settings(
    engine: Engine, total_blocks: int | None
) -> None:
    sizes = 'vllm:cache_config_info{engine="0",block_size="32"} 1\n'
    engine.pages["/metrics"] = engine.says(web.Response, text=ONE_RANK + sizes)
    await engine.follow(total_blocks=total_blocks, block_size=16)
    last = await engine.heard(lambda one: one.block_size == 16, "the block size")
    assert last.total_blocks == (None if total_blocks is None else 200)
