"""What goes wrong with a fleet of real processes, and which alerts fire then and no others."""

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import nats
import zmq
import zmq.asyncio

from events.plane.facts import Beat, decode_stream, encode
from kvroute.client import KvRouteError
from kvroute.v1 import Progress, ProgressState
from router.cluster.children.process import end
from tests.scraped.engines import MODEL
from tests.scraped.stage import EPP, TOKENS, Fleet, Setup, stop
from tests.stage.proxy import Proxy

FINISHED = ProgressState.PROGRESS_STATE_FINISHED
CUT_S = 0.5
"""How long a broken connection stays away: several messages are published meanwhile."""
_USERS = """
authorization: {{
  users: [ {{user: router, password: router}}, {{user: relay, password: relay{}}} ]
}}"""
USERS = _USERS.format("")
NO_SNAPSHOTS = _USERS.format(', permissions: {subscribe: {deny: "kvroute.v1.*.snapshot.*.*"}}')


class Story(NamedTuple):
    """A fleet, its trouble, and what fires then."""

    told: str
    fires: set[str]
    play: Callable[[Fleet], Awaitable[object]]
    """Makes the trouble, and keeps it up; may return where it stays by itself."""
    setup: Setup = Setup()
    may: frozenset[str] | set[str] = frozenset()
    """What may fire beside, since the trouble has these consequences, sooner or later."""


# --- requests -------------------------------------------------------------------------------------


def same_prompts(every_s: float, count: int, length: int) -> Any:
    """Completions of the same prompts in turn."""

    async def play(fleet: Fleet) -> None:
        prompts = itertools.cycle([fleet.tokens(length) for _ in range(count)])
        await fleet.ask_for_it(every_s, lambda: fleet.complete(next(prompts)))

    return play


def new_prompts(every_s: float, length: int = 256, max_tokens: int = 8) -> Any:
    """Completions of prompts that were never there."""

    async def play(fleet: Fleet) -> None:
        await fleet.ask_for_it(every_s, lambda: fleet.complete(fleet.tokens(length), max_tokens))

    return play


def routes(every_s: float, hold_s: float | None = None, max_tokens: int = 8, **options: Any) -> Any:
    """Picks by gRPC that are held for a while, then reported; None: never reported."""

    async def play(fleet: Fleet) -> None:
        async def one() -> None:
            try:
                pick = await fleet.client.route(token_ids=fleet.tokens(64), **options)
            except KvRouteError:
                return  # refused, which is counted
            await fleet.send(pick.address, max_tokens)
            if hold_s is not None:
                await asyncio.sleep(hold_s)
                done = Progress(reservation_id=pick.reservation_id, state=FINISHED)
                await fleet.client.report(done)

        await fleet.ask_for_it(every_s, one)

    return play


def failing(mode: str, traffic: Any, *workers: int) -> Any:
    """Engines fail in a mode, under traffic."""

    async def play(fleet: Fleet) -> None:
        fleet.fail(mode, *workers)
        await traffic(fleet)

    return play


# --- processes ------------------------------------------------------------------------------------


def kill_routers(*routers: int) -> Any:
    async def play(fleet: Fleet) -> None:
        for router in routers:
            fleet.routers[router].kill()

    return play


async def stop_relay(fleet: Fleet) -> None:
    stop(fleet.relay)


async def stop_engines(fleet: Fleet) -> None:
    stop(fleet.engines)


async def kill_nats(fleet: Fleet) -> None:
    os.kill(fleet.nats.pid, signal.SIGKILL)


async def kill_children(fleet: Fleet) -> None:
    """Ends what renders prompts, again and again, as the OOM killer does."""
    (router,) = fleet.routers
    while True:
        for child in children_of(router.pid):
            os.kill(child, signal.SIGKILL)
        await fleet.chat(fleet.prompt())
        await asyncio.sleep(1.0)


def children_of(pid: int) -> list[int]:
    """Processes that render a router's prompts."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"prompt_processes" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


async def routers_go(fleet: Fleet) -> None:
    """Under traffic through a gateway that stays."""
    for router in fleet.routers:
        router.kill()
    await new_prompts(0.5)(fleet)


async def tear_the_ledger(fleet: Fleet) -> None:
    """A relay starts again and can't use its file."""
    await fleet.complete(fleet.tokens(256))
    await fleet.until("kvroute_relay_ledger_entries{FLEET} > 0", "the relay has a map")
    await end(fleet.relay)
    files = [path for path in (fleet.folder / "relay.state").rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-7])
    fleet.relay = fleet.run_relay()


async def cut(wires: list[Proxy], every_s: float) -> None:
    """Connections break, again and again, for long enough to miss messages."""
    while True:
        for wire in wires:
            wire.cut()
        await asyncio.sleep(CUT_S)
        for wire in wires:
            await wire.heal()
        await asyncio.sleep(every_s - CUT_S)


async def cut_events(fleet: Fleet) -> None:
    """Those from the engines' events to the relay."""
    await asyncio.gather(cut(fleet.event_wires, 1.0), new_prompts(0.2)(fleet))


async def other_publisher(fleet: Fleet) -> None:
    """The endpoint of the engines' events is another program's."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        for wire in fleet.event_wires:
            wire.target = port
            wire.drop()
        while True:
            await socket.send_multipart([fleet.workers[0]["topic"].encode(), b"no number", b"{}"])
            await asyncio.sleep(0.5)


async def cut_router(fleet: Fleet) -> None:
    """That of a router to NATS, so that it misses messages."""
    await asyncio.gather(cut(fleet.nats_wires[:1], 5.0), new_prompts(0.1)(fleet))


async def forbid_snapshots(fleet: Fleet) -> None:
    """Also of streams that have to be read again, since the relay's connection breaks."""
    fleet.nats.write(NO_SNAPSHOTS)
    await fleet.nats.reload()
    await asyncio.gather(cut(fleet.nats_wires[1:], 5.0), new_prompts(0.1)(fleet))


async def lie(fleet: Fleet) -> None:
    """After each beat comes another one with a wrong digest."""
    client = await nats.connect(fleet.nats.url)
    lies: set[bytes] = set()

    async def on_message(message: Any) -> None:
        beat, _ = decode_stream(message.data)
        if isinstance(beat, Beat) and message.data not in lies:
            lied = encode(msgspec.structs.replace(beat, digest=beat.digest ^ 1))
            lies.add(lied)
            await client.publish(message.subject, lied)

    await client.subscribe(f"kvroute.v1.{fleet.name}.facts.*.*", cb=on_message)
    try:
        await new_prompts(0.5)(fleet)
    finally:
        await client.close()


async def publish_nonsense(fleet: Fleet) -> None:
    """What is no message of a relay comes in its place."""
    client = await nats.connect(fleet.nats.url)
    subject = f"kvroute.v1.{fleet.name}.facts.worker-0.0"
    try:
        while True:
            await client.publish(subject, fleet.rng.randbytes(64))
            await asyncio.sleep(0.5)
    finally:
        await client.close()


async def reuse_is_passed_over(fleet: Fleet) -> None:
    """Each prompt comes three times."""

    async def thrice() -> None:
        prompt = fleet.tokens(512)
        for _ in range(3):
            await fleet.complete(prompt)

    await fleet.ask_for_it(0.5, thrice)


async def all_to_one(fleet: Fleet) -> None:
    """Long answers of one worker, which runs fewer at once than its relay says."""

    async def one() -> None:
        try:
            async with fleet.client.request(
                token_ids=fleet.tokens(64), allowed_worker_ids=["worker-0"]
            ) as request:
                await fleet.send(request.pick.address, 400)
        except KvRouteError:
            return  # refused, which is counted

    await fleet.ask_for_it(0.5, one)


async def half_for_nobody(fleet: Fleet) -> None:
    """Requests for a model that nobody serves, also past the limit of their key, beside as many
    that are served."""
    await asyncio.gather(
        routes(0.3, 0.1)(fleet),
        routes(0.3, 0.1, model="nobody")(fleet),
        fleet.ask_for_it(1.0, lambda: fleet.pick(fleet.prompt(), "nobody")),
    )


async def few_wait(fleet: Fleet) -> None:
    """Two callers for the only place: each waits for the other."""

    async def caller() -> None:
        while True:
            try:
                pick = await fleet.client.route(token_ids=fleet.tokens(64))
            except KvRouteError:
                continue
            await fleet.send(pick.address)
            await asyncio.sleep(2.5)
            await fleet.client.report(Progress(reservation_id=pick.reservation_id, state=FINISHED))

    await asyncio.gather(caller(), caller())


async def chats(fleet: Fleet) -> None:
    await fleet.ask_for_it(0.5, lambda: fleet.chat(fleet.prompt()))


async def chats_and_picks(fleet: Fleet) -> None:
    """Of a gateway, and of a picker."""
    picks = fleet.ask_for_it(1.0, lambda: fleet.pick(fleet.prompt()))
    await asyncio.gather(chats(fleet), picks)


async def a_second_relay(fleet: Fleet) -> None:
    """For the same engines."""
    fleet.write_relay("second", 0)
    fleet.second = fleet.run_relay("second")
    await new_prompts(0.3)(fleet)


# --- the table ------------------------------------------------------------------------------------

BLIND = {"KvrouteMostStreamsNotLive", "KvrouteStreamNotLive", "KvrouteNoWorkerUp"}
"""Of relays that are not heard."""
STORIES = [
    Story(
        "all routers are killed",
        {"KvrouteNoRouterReady", "KvrouteRoutersMissing"},
        kill_routers(0, 1),
        Setup(routers=2),
    ),
    Story(
        "one router of two is killed",
        {"KvrouteRoutersMissing"},
        kill_routers(1),
        Setup(routers=2),
    ),
    Story(
        "a gateway's routers are killed",
        {"KvrouteNoRouterReady", "KvrouteGatewayWithoutRouter"},
        routers_go,
        Setup(gateway=True),
    ),
    Story(
        "the relay of all workers hangs",
        {"KvrouteNoWorkerUp", "KvrouteMostStreamsNotLive"},
        stop_relay,
        may=BLIND,
    ),
    Story(
        "engines hang",
        {"KvrouteEngineSilent", "KvrouteNoWorkerUp"},
        stop_engines,
        may={"KvrouteWorkerWarning", "KvrouteRelayErrors"},
    ),
    Story(
        "one engine of three answers 500",
        {"KvrouteWorkerEjected"},
        failing("errors", new_prompts(0.2), 0),
        Setup(engines=3),
    ),
    Story(
        "all engines answer 500",
        {"KvrouteGatewayFails", "KvrouteGatewayRetriesSpent"},
        # More than ten retries a second.
        failing("errors", new_prompts(0.1)),
        Setup(engines=6),
        may={"KvrouteWorkerEjected", "KvrouteRequestsRefused", "KvrouteHitsMissed"},
    ),
    Story(
        "answers end in their middle",
        {"KvrouteGatewayFails"},
        failing("cut", new_prompts(0.2)),
        may={"KvrouteWorkerEjected", "KvrouteRequestsRefused"},
    ),
    Story(
        "half of the requests are for no model",
        {"KvrouteRequestsRefused"},
        half_for_nobody,
        Setup(EPP, limits={"requests_per_s": 5}),
    ),
    Story(
        "requests wait for the only place",
        {"KvrouteRequestsWaitLong"},
        few_wait,
        Setup({"queue": {"timeout_s": 4}}, engines=1, slots=1),
    ),
    Story(
        "a queue of one request is full",
        {"KvrouteQueueRefuses"},
        routes(0.25, 1.0),
        Setup({"queue": {"max_waiting": 1}}, engines=1, slots=1),
        may={"KvrouteRequestsRefused", "KvrouteRequestsWaitLong"},
    ),
    Story(
        "a bug of the router",
        {"KvrouteInternalErrors"},
        routes(0.5, 0.1),
        Setup(program=("tests.scraped.odd_router", "serve")),
        may={"KvrouteRequestsRefused"},
    ),
    Story(
        "an own policy is slow",
        {"KvrouteDecisionsSlow"},
        routes(0.5, 0.1),
        Setup(
            {
                "routing": {
                    "policy": "tests.scraped.odd_policies:slow",
                    "own_policies": ["tests.scraped.odd_policies:slow"],
                }
            }
        ),
    ),
    Story(
        "callers never report",
        {"KvrouteReservationsExpire"},
        # Of engines that have to preempt, too.
        routes(0.3, max_tokens=300),
        Setup({"routing": {"lease_s": 2}}, blocks=64, speed=1.0),
    ),
    Story(
        "a policy ignores caches",
        {"KvrouteHitsMissed"},
        reuse_is_passed_over,
        Setup({"routing": {"policy": "round-robin"}}, engines=4),
    ),
    Story(
        "all requests go to one worker",
        {"KvrouteLoadUneven"},
        all_to_one,
        Setup(slots=2, speed=2.0, workers=({"slots": 64}, {"slots": 64})),
        may={"KvrouteReservationsExpire"},
    ),
    Story(
        "NATS is killed",
        {"KvrouteNatsDisconnected", "KvrouteMostStreamsNotLive"},
        kill_nats,
        may={*BLIND, "KvrouteRelayErrors", "KvrouteNatsErrors"},
    ),
    Story(
        "a router's connection to NATS breaks",
        {"KvrouteGaps"},
        cut_router,
        Setup(wired=True),
        may={*BLIND, "KvrouteNatsDisconnected", "KvrouteNatsErrors", "KvrouteWorkerWarning"},
    ),
    Story(
        "relays may not send snapshots",
        {"KvrouteRecoveriesFail", "KvrouteStreamNotLive", "KvrouteNatsErrors"},
        forbid_snapshots,
        Setup(users=USERS, wired=True),
        may={*BLIND, "KvrouteNatsDisconnected", "KvrouteRelayErrors", "KvrouteWorkerWarning"},
    ),
    Story(
        "two relays for the same engines",
        {"KvrouteWorkerWarning"},
        a_second_relay,
        may={*BLIND, "KvrouteGaps"},
    ),
    Story(
        "beats come with wrong digests",
        {"KvrouteDigestsDiffer"},
        lie,
        may={*BLIND, "KvrouteWorkerWarning"},
    ),
    Story(
        "engines publish nothing",
        {"KvrouteWorkerWarning"},
        new_prompts(0.5),
        Setup(fails="mute"),
    ),
    Story(
        "blocks go without an event",
        {"KvrouteSelfCheckResyncs"},
        # Each of the engines has room for two of its four or so.
        failing("forgets", same_prompts(0.2, count=32, length=480)),
        Setup(engines=8, blocks=64),
        may={"KvrouteHitsMissed", "KvrouteWorkerWarning"},
    ),
    Story(
        "the index has no room",
        {"KvrouteIndexFull"},
        new_prompts(0.3, length=4000, max_tokens=1),
        Setup({"index": {"memory_mib": 1}}, blocks=65_536),
    ),
    Story(
        "nonsense is published",
        {"KvrouteFactsDropped"},
        publish_nonsense,
        may={*BLIND, "KvrouteWorkerWarning"},
    ),
    Story(
        "the engines' events break off",
        {"KvrouteEngineGaps"},
        cut_events,
        Setup(wired=True),
        may={"KvrouteRelayErrors"},
    ),
    # The relay that starts again is not heard meanwhile.
    Story("a relay's ledger is torn", {"KvrouteRelayLedgersLost"}, tear_the_ledger, may=BLIND),
    Story(
        "the engines' events are another program's",
        {"KvrouteRelayErrors"},
        other_publisher,
        Setup(wired=True),
        may={"KvrouteWorkerWarning", "KvrouteEngineGaps"},
    ),
    Story(
        "engines make other tokens",
        {"KvrouteTokensDiffer"},
        failing("other-tokens", chats),
        Setup({"models": [{"name": MODEL, "prompts": {"folder": TOKENS}}]}),
        may={"KvrouteWorkerWarning", "KvroutePromptsEstimated"},
    ),
    Story(
        "a model's tokenizer is not there",
        {"KvroutePromptsEstimated"},
        chats_and_picks,
        Setup(
            EPP | {"models": [{"name": MODEL, "prompts": {"folder": "/none", "source": "local"}}]}
        ),
    ),
    Story(
        "what renders prompts is killed",
        {"KvroutePromptChildrenKilled"},
        kill_children,
        Setup({"models": [{"name": MODEL, "prompts": {"folder": TOKENS}}]}),
        may={"KvroutePromptsEstimated"},
    ),
    Story(
        "a gateway is full",
        {"KvrouteGatewayFull"},
        new_prompts(0.2, max_tokens=400),
        Setup({"gateway": {"open_max": 2}}, speed=1.0),
    ),
]
