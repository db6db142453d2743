"""The processes of a run: real NATS, engines, relays, routers, clients, and how each is ended.

Law: every process that a stage started has ended when the stage has; one that ended by itself is
noted.
"""

import asyncio
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from router.cluster.children.nats_server import server_binary
from router.cluster.children.process import launched
from tests.chaos.locked import write_locks
from tests.chaos.records import Ended, Held, Memory, RouterSeen, WorkerSeen
from tests.chaos.schedule import Sizes
from tests.stage.proxy import Proxy, proxy_to
from tests.stage.waiting import accepts

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
"""For a process to be there, on a machine whose cores are all busy."""
END_S = 20.0
CLOCK_AHEAD_S = 3600.0
"""Of the last router."""
ENGINE_PORTS = 3
_LINE_BYTES = 1 << 22
_LOG_END_LINES = 40
"""Of a process that ended by itself: a traceback, and what led to it."""
_PORTS = range(20_000, 32_000)
"""Below those that Linux hands out by itself."""

Kind = Literal["router", "relay", "engine", "client", "hostile", "nats"]
_NICE: dict[Kind, int] = {"engine": 10, "client": 5, "hostile": 10}
"""Processes that would have other hosts come after the rest: five engines that start again at once
take both cores of a small machine for seconds."""


@dataclass(frozen=True)
class Options:
    """How large a run is."""

    seed: int
    sizes: Sizes = field(default_factory=Sizes)
    relays: int = 8
    """Processes that share the engines' relays."""
    rate: float = 80.0
    """Requests a second, over all clients."""
    attempts: bool = True
    first_byte_s: float = 2.0
    """Of clients' patience with engines, before an answer begins."""
    route_s: float = 5.0
    """Of clients' patience with routers."""
    lease_s: float = 20.0
    engine_blocks: int = 2048
    engine_slots: int = 256
    engine_speed: float = 1.0
    tls: bool = False
    """Routers have TLS and take callers with tokens alone."""
    gateways: bool = False
    """Clients send to the routers' gateways, and wait for first_byte_s for every byte."""
    hostile_every_s: float | None = 0.5
    """Between two of its messages; None: there is no hostile client."""
    leak_mib_a_minute: float = 0.0
    """Of each router, on purpose."""


class Child:
    """One process; started again, it is the same child."""

    def __init__(self, name: str, kind: Kind, command: Sequence[str], log: Path) -> None:
        self.name, self.kind = name, kind
        self.process: asyncio.subprocess.Process | None = None
        self.wanted = False
        """Whether it should be running; if not, its end is nobody's fault."""
        self.told: dict[str, Any] = {}
        """Its last answer."""
        self._command = command
        self._log = log
        self._talking = asyncio.Lock()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, *, answers: bool) -> None:
        """Runs it. answers: it says on its output that it is there; returns then."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *("nice", "-n", str(_NICE.get(self.kind, 0))),
                *launched(self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if answers else log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        self.wanted = True
        if answers:
            await self.answer(START_S)

    async def answer(self, seconds: float) -> dict[str, Any]:
        """Its next line."""
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see {self._log}")
        self.told = msgspec.json.decode(line)
        return self.told

    async def ask(self, seconds: float = START_S, **command: object) -> dict[str, Any]:
        """Sends one command, and returns what is answered."""
        async with self._talking:
            assert self.process is not None
            assert self.process.stdin is not None
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            await self.process.stdin.drain()
            return await self.answer(seconds)

    def send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """Ends it at once."""
        self.wanted = False
        self.send(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()

    async def end(self) -> int:
        """Has it end in order; its exit code."""
        self.wanted = False
        process = self.process
        if process is None:
            return 0
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                return await process.wait()
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    def log_end(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_END_LINES:])

    def ended(self) -> Ended | None:
        """Noted when it should be running and isn't."""
        process = self.process
        if not self.wanted or process is None or process.returncode is None:
            return None
        return Ended(process=self.name, kind=self.kind, code=process.returncode)


@dataclass
class Stage:
    """Everything that runs."""

    options: Options
    folder: Path
    nats: Child
    nats_port: int
    engines: list[Child] = field(default_factory=list)
    engine_ports: list[int] = field(default_factory=list)
    relays: list[Child] = field(default_factory=list)
    wires: dict[int, list[Proxy]] = field(default_factory=dict)
    """Worker -> proxies between engine and relay: HTTP, events, replays."""
    routers: list[Child] = field(default_factory=list)
    router_ports: list[int] = field(default_factory=list)
    gateway_ports: list[int] = field(default_factory=list)
    lines: dict[tuple[int, int], Proxy] = field(default_factory=dict)
    """(client, router) -> the proxy between them."""
    clients: list[Child] = field(default_factory=list)
    hostile: Child | None = None

    @property
    def senders(self) -> list[Child]:
        """All clients."""
        return [*self.clients, *([self.hostile] if self.hostile else [])]

    @property
    def children(self) -> list[Child]:
        return [self.nats, *self.engines, *self.relays, *self.routers, *self.senders]

    def relay_of(self, worker: int) -> Child:
        return self.relays[worker % len(self.relays)]

    def ended(self) -> list[Ended]:
        """Processes that ended by themselves."""
        return [one for child in self.children if (one := child.ended())]

    async def held(self) -> dict[str, Held]:
        """What each engine's cache holds, by its own account."""
        found = {}
        for engine in self.engines:
            told = await engine.ask(truth=True)
            found[engine.name] = Held(blocks=told["blocks"], digest=told["digest"])
        return found

    async def seen(self, warm: Sequence[Memory] = ()) -> list[RouterSeen]:
        """What each router believes. warm: the memory of each when the warm-up was over."""
        found = []
        for i, router in enumerate(self.routers):
            file = self.folder / f"{router.name}.seen"
            file.unlink(missing_ok=True)
            await until(file.exists, f"{router.name} to tell", every=partial(_wake, router))
            told = msgspec.json.decode(file.read_bytes())
            workers = msgspec.convert(told["workers"], dict[str, WorkerSeen])
            memory = msgspec.convert(told["memory"], Memory)
            found.append(
                RouterSeen(
                    name=router.name,
                    workers=workers,
                    reservations=told["reservations"],
                    replica=told["replica"],
                    warm=warm[i] if warm else memory,
                    quiet=memory,
                )
            )
        return found


@asynccontextmanager
async def a_stage(options: Options, folder: Path) -> AsyncIterator[Stage]:
    """Everything up but the clients; each worker gets requests from each router."""
    rng = random.Random(f"{options.seed}/ports")
    ports = free_ports(rng, 64 + ENGINE_PORTS * options.sizes.workers)
    async with AsyncExitStack() as stack:
        nats_port = ports.pop()
        nats = Child(
            "nats",
            "nats",
            [server_binary(), "--addr", "127.0.0.1", "--port", str(nats_port)],
            folder / "nats.log",
        )
        stage = Stage(options, folder, nats, nats_port)
        stack.push_async_callback(_end_all, stage)
        await nats.start(answers=False)
        await until(lambda: accepts(nats_port), "nats-server to listen")
        for i in range(options.sizes.workers):
            await _add_engine(stage, i, ports, stack)
        locks = write_locks(folder) if options.tls else {}
        for i in range(options.sizes.routers):
            _add_router(stage, i, ports, locks)
        for i in range(min(options.relays, options.sizes.workers)):
            _add_relay(stage, i)
        await asyncio.gather(*(engine.start(answers=True) for engine in stage.engines))
        for child in (*stage.routers, *stage.relays):
            await child.start(answers=False)
        for client in range(options.sizes.clients):
            for router, port in enumerate(stage.router_ports):
                # A client is a host, for a router that weighs what its callers report.
                source = f"127.0.1.{1 + client}"
                proxy = await stack.enter_async_context(proxy_to(port, source))
                stage.lines[client, router] = proxy
        for port in stage.router_ports:
            await until(lambda port=port: accepts(port), "a router to listen")
        await until_seen(stage, all_in_use, "every worker to get requests")
        yield stage


def all_in_use(stage: Stage, routers: Iterable[RouterSeen]) -> bool:
    return all(
        name in router.workers and not router.workers[name].excluded
        for router in routers
        for name in (engine.name for engine in stage.engines)
    )


async def start_clients(stage: Stage) -> None:
    """Traffic begins."""
    options = stage.options
    engine_ports = [str(port) for port in stage.engine_ports]
    for client in range(options.sizes.clients):
        routers = [f"127.0.0.1:{stage.lines[client, i].port}" for i in range(options.sizes.routers)]
        command = [
            *(sys.executable, "-m", "tests.chaos.client", "--number", str(client)),
            *("--routers", *routers, "--engines", *engine_ports),
            *("--rate", str(options.rate / options.sizes.clients), "--seed", str(options.seed)),
            *("--first-byte-s", str(options.first_byte_s), "--route-s", str(options.route_s)),
            *("--out", str(stage.folder / f"client-{client}.jsonl")),
            *(("--attempts",) if options.attempts else ()),
            *(("--gateways", *map(str, stage.gateway_ports)) if options.gateways else ()),
            *_locked(stage),
        ]
        log = stage.folder / f"client-{client}.log"
        stage.clients.append(Child(f"client-{client}", "client", command, log))
    if options.hostile_every_s is not None:
        stage.hostile = _a_hostile_client(stage, options.hostile_every_s)
    for child in stage.senders:
        await child.start(answers=True)


def _locked(stage: Stage) -> tuple[str, ...]:
    """The words of a process that calls routers."""
    return ("--locks", str(stage.folder)) if stage.options.tls else ()


def _a_hostile_client(stage: Stage, every_s: float) -> Child:
    routers = [f"127.0.0.1:{port}" for port in stage.router_ports]
    command = [
        *(sys.executable, "-m", "tests.chaos.hostile", "--routers", *routers),
        *("--nats-port", str(stage.nats_port), "--seed", str(stage.options.seed)),
        *("--every-s", str(every_s)),
        *_locked(stage),
    ]
    return Child("hostile", "hostile", command, stage.folder / "hostile.log")


async def stop_clients(stage: Stage) -> dict[str, dict[str, Any]]:
    """Traffic ends; what each client counted."""
    told = {}
    for child in stage.senders:
        if child.ended() is None:
            told[child.name] = await child.ask(stop=True)
            child.wanted = False
            assert child.process is not None
            await child.process.wait()
    return told


async def _add_engine(stage: Stage, i: int, ports: list[int], stack: AsyncExitStack) -> None:
    options = stage.options
    port = _three_in_a_row(ports)
    stage.engine_ports.append(port)
    name = f"worker-{i}"
    command = [
        *(sys.executable, "-m", "tests.chaos.engine", "--name", name, "--port", str(port)),
        *("--blocks", str(options.engine_blocks), "--speed", str(options.engine_speed)),
        *("--slots", str(options.engine_slots), "--seed", str(options.seed * 1000 + i)),
    ]
    stage.engines.append(Child(name, "engine", command, stage.folder / f"{name}.log"))
    if i < options.sizes.wired:
        stage.wires[i] = [
            await stack.enter_async_context(proxy_to(port + offset))
            for offset in range(ENGINE_PORTS)
        ]


def _add_router(stage: Stage, i: int, ports: list[int], locks: dict[str, Any]) -> None:
    options, name = stage.options, f"router-{i}"
    port = ports.pop()
    stage.router_ports.append(port)
    config = {
        "nats": {"url": f"nats://127.0.0.1:{stage.nats_port}"},
        "grpc": {"listen": f"127.0.0.1:{port}"},
        "metrics": {"listen": ""},
        "log": {"level": "warning", "format": "plain"},
        # Sessions are forgotten soon, so that what a router learns is as much as it will be before
        # the laws about memory begin.
        "routing": {
            "lease_s": options.lease_s,
            "session_ttl_s": 60.0,
        },
        "decision_log": {
            "file": str(stage.folder / f"{name}.decisions"),
            "share": 0.05,
            "max_mib": 4,
        },
        "drain_timeout_s": 5.0,
        **locks,
    }
    if options.gateways:
        stage.gateway_ports.append(ports.pop())
        listen = f"127.0.0.1:{stage.gateway_ports[-1]}"
        config["gateway"] = {"listen": listen, "answer_headers": True}
    file = stage.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    ahead_s = CLOCK_AHEAD_S if i == options.sizes.routers - 1 and i else 0.0
    command = [
        *(sys.executable, "-m", "tests.chaos.router", "--config", str(file)),
        *("--seen", str(stage.folder / f"{name}.seen"), "--ahead-s", str(ahead_s)),
        *("--leak", str(options.leak_mib_a_minute)),
    ]
    stage.routers.append(Child(name, "router", command, stage.folder / f"{name}.log"))


def _add_relay(stage: Stage, i: int) -> None:
    """A relay process for every n-th engine from the i-th on."""
    workers = []
    relays = min(stage.options.relays, len(stage.engines))
    for number in range(i, len(stage.engines), relays):
        port = stage.engine_ports[number]
        wires = [proxy.port for proxy in stage.wires.get(number, ())]
        http, events, replay = wires or (port, port + 1, port + 2)
        workers.append(
            {
                "id": f"worker-{number}",
                "engine": "vllm",
                "address": f"http://127.0.0.1:{port}",
                "metrics": f"http://127.0.0.1:{http}",
                "events": f"tcp://127.0.0.1:{events}",
                "replay": f"tcp://127.0.0.1:{replay}",
                "topic": "kv-events",
                "slots": stage.options.engine_slots,
            }
        )
    config = {
        "nats": {"url": f"nats://127.0.0.1:{stage.nats_port}"},
        "metrics": {"listen": ""},
        "log": {"level": "warning", "format": "plain"},
        "state_dir": str(stage.folder / f"relay-{i}.state"),
        "workers": workers,
    }
    file = stage.folder / f"relay-{i}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "router.app.main", "relay", "--config", str(file)]
    stage.relays.append(Child(f"relay-{i}", "relay", command, stage.folder / f"relay-{i}.log"))


async def _end_all(stage: Stage) -> None:
    """Those first that others' ends would trouble."""
    for group in (stage.senders, stage.routers, stage.relays, stage.engines):
        await asyncio.gather(*(child.end() for child in group))
    await stage.nats.end()


async def until_seen(
    stage: Stage,
    holds: Callable[[Stage, Iterable[RouterSeen]], object],
    told: str,
    seconds: float = START_S,
) -> None:
    """Waits until `holds(stage, what the routers believe)`."""
    give_up_s = time.monotonic() + seconds
    while not holds(stage, await stage.seen()):
        if time.monotonic() > give_up_s:
            raise AssertionError(f"waited {seconds:g} s in vain for: {told}")
        await asyncio.sleep(0.2)


def _wake(router: Child) -> None:
    """Has a router tell what it believes; one that starts may not hear it."""
    router.send(signal.SIGUSR1)


async def until(
    condition: Callable[[], object],
    told: str,
    seconds: float = START_S,
    every: Callable[[], object] | None = None,
) -> None:
    """Waits for something that other processes bring about. every: called once a second."""
    give_up_s = time.monotonic() + seconds
    again_s = 0.0
    while not condition():
        if every is not None and time.monotonic() >= again_s:
            every()
            again_s = time.monotonic() + 1.0
        if time.monotonic() > give_up_s:
            raise AssertionError(f"waited {seconds:g} s in vain for: {told}")
        await asyncio.sleep(0.02)


def free_ports(rng: random.Random, count: int) -> list[int]:
    """Ports of loopback that nobody has, downwards; many of them in a row."""
    start = rng.randrange(_PORTS.start, _PORTS.stop - 4 * count)
    found: list[int] = []
    for port in range(start, _PORTS.stop):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found[::-1]
    raise RuntimeError("too few free ports")


def _three_in_a_row(ports: list[int]) -> int:
    """Takes the next ports that follow one another; the first of them."""
    while True:
        first = ports.pop()
        if ports[-2:] == [first + 2, first + 1]:
            del ports[-2:]
            return first
