"""A fleet on loopback: routers and relays that the chart renders, NATS, engines, and a client.

Law: all processes of a fleet end with it; those that play no part in a story run to its end.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import helm_python as helm
import msgspec
import yaml

from kvroute.client import KvRouteClient
from router.cluster.children.process import Child, end, spawn
from tests.scraped.divided import divided_rules
from tests.scraped.engines import MODEL
from tests.scraped.prometheus import Prometheus
from tests.scraped.release import CHART, Pod, Release
from tests.stage.nats_server import NatsServer, nats_server
from tests.stage.picker import process_of, request_body, request_headers
from tests.stage.ports import client_context
from tests.stage.prompts.byte_tokenizer import make_folder
from tests.stage.proxy import Proxy, proxy_to
from tests.stage.waiting import free_port

LIMIT_S = 400.0
"""For anything to happen, on a machine whose cores are all busy."""
SCRAPED = {"example.com/scraped": "true"}
"""Label of pods that the chart's PodMonitor selects: relays, and a gateway of its own."""
PORT_NAME = "relay-metrics"
TOKENS = "TOKENS"
"""In a configuration: the folder of the stand-ins' tokenizer."""
EPP = {"picker": {"listen": "[::]:9002"}}
"""In a configuration: the endpoint picker."""
BUSY = {"KvrouteDecisionsSlow", "KvroutePromptsEstimated"}
"""Fire with reason where other programs take all cores: decisions take long, and engines give no
tokens in time."""
UNSCRAPED = {"KvrouteNoRouterReady", "KvrouteRoutersMissing"}
"""Fire with reason where a scrape, which has as little time as there is between two, had no answer
in time."""
SERVE = ("router.app.main", "serve")
Found = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Setup:
    """What differs from one router, one relay, and two engines."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Below `config` of the chart's values."""
    routers: int = 1
    program: tuple[str, ...] = SERVE
    """The module that is a router, with its first arguments."""
    engines: int = 2
    blocks: int = 4096
    slots: int = 64
    speed: float = 20.0
    fails: str = ""
    """Mode of the engines from the start."""
    workers: tuple[Mapping[str, Any], ...] = ()
    """More of the entry of each worker in the relay's configuration."""
    pods: int = 0
    """Engines without a relay here: `found` has them."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Of the key of all callers."""
    gateway: bool = False
    """A gateway in a process of its own."""
    users: str = ""
    """In the configuration of NATS, with the users `router` and `relay`; empty: no users."""
    wired: bool = False
    """Proxies stand before NATS, and between the engines' events and the relay."""


class Fleet:
    """One release, and what stands beside it."""

    def __init__(
        self, name: str, setup: Setup, folder: Path, prometheus: Prometheus, found: Found
    ) -> None:
        self.name, self.setup, self.folder, self.prometheus = name, setup, folder, prometheus
        self._found = found
        self.rng = random.Random(name)
        self.release: Release
        self.nats: NatsServer
        self.nats_wires: list[Proxy] = []
        """Of the routers, and of the relay."""
        self.event_wires: list[Proxy] = []
        self.workers: list[dict[str, Any]] = []
        self.engines: Child
        self.relay: Child
        self.second: Child
        """Another relay of the same engines."""
        self.routers: list[Child] = []
        self.pods: list[Pod] = []
        self.gateway_pod: Pod | None = None
        self.client: KvRouteClient
        self.picker: grpc.aio.Channel
        self.http: aiohttp.ClientSession

    @property
    def alerts(self) -> set[str]:
        """Names of all rules."""
        groups = self.release.rules["groups"]
        return {rule["alert"] for group in groups for rule in group["rules"]}

    def fail(self, mode: str, *workers: int) -> None:
        """Has engines fail from now on, all by default."""
        for worker in workers or range(self.setup.engines):
            (self.folder / "fails" / f"worker-{worker}").write_text(mode)

    def run(self, name: str, *words: str) -> Child:
        """A Python module as a process, with its log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return spawn([sys.executable, "-m", *words], log)

    def run_relay(self, name: str = "relay") -> Child:
        return self.run(
            name, "router.app.main", "relay", "--config", str(self.folder / f"{name}.yaml")
        )

    def write_relay(self, name: str, port: int, **more: Any) -> None:
        """The configuration of a relay of all workers."""
        config = {
            "fleet": {"name": self.name},
            "nats": self._nats("relay", self.nats_wires[-1:]),
            "engines": {"numbers": {"waiting": "vllm:num_requests_waiting"}},
            "metrics": {"listen": f"127.0.0.1:{port}"},
            "log": {"format": "plain"},
            "state_dir": str(self.folder / f"{name}.state"),
            "workers": self.workers[: self.setup.engines - self.setup.pods],
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config | more))

    def router_port(self, name: str, router: int = 0) -> int:
        """A port of a router's pod, by its name in the chart."""
        return self.pods[router].ports[name]

    async def complete(self, prompt: object, max_tokens: int = 8, **about: Any) -> int:
        """A completion through a gateway; its status, 0 for an answer that breaks off."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
        return await self.post("/v1/completions", body | about)

    async def chat(self, text: str, *, inside: bool = False, **about: Any) -> int:
        """As complete, of a chat. inside: through the gateway of a router."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        return await self.post("/v1/chat/completions", body | about, inside=inside)

    async def post(self, path: str, body: object, *, inside: bool = False) -> int:
        if self.gateway_pod is not None and not inside:
            base = f"http://127.0.0.1:{self.gateway_pod.ports[PORT_NAME]}"
        else:
            base = f"https://localhost:{self.router_port('http')}"
        headers = {"Authorization": f"Bearer {self.release.token}"}
        try:
            async with self.http.post(base + path, json=body, headers=headers) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def pick(self, prompt: object, model: str = MODEL) -> None:
        """A completion for the picker, as Envoy sends it; awaits the answer."""
        stream = process_of(self.picker)()
        await stream.write(request_headers("/v1/completions"))
        body = json.dumps({"model": model, "prompt": prompt})
        await stream.write(request_body(body.encode()))
        await stream.read()
        stream.cancel()

    async def send(self, address: str, max_tokens: int = 8) -> None:
        """A completion of new tokens, from an engine."""
        body = {"prompt": self.tokens(64), "max_tokens": max_tokens}
        async with self.http.post(f"{address}/v1/completions", json=body) as answer:
            await answer.read()

    def tokens(self, count: int) -> list[int]:
        """A prompt of new tokens."""
        return [self.rng.randrange(100_000) for _ in range(count)]

    def prompt(self, length: int = 256) -> str:
        """A prompt of new tokens, a token a character."""
        return "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    async def ask_for_it(self, every_s: float, request: Callable[[], Awaitable[object]]) -> None:
        """Calls again and again, each by itself, up to 64 at once; never returns."""
        under_way: set[asyncio.Task[object]] = set()

        async def once() -> object:
            return await request()

        async with asyncio.TaskGroup() as group:
            while True:
                if len(under_way) < 64:
                    task = group.create_task(once())
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                await asyncio.sleep(every_s)

    async def count(self, expression: str) -> float:
        """A number of this fleet, as scraped; FLEET stands for its label. Absent: 0."""
        found = await self.prometheus.query(expression.replace("FLEET", f'fleet="{self.name}"'))
        return sum(value for _, value in found)

    async def until(self, expression: str, told: str) -> None:
        """Waits until an expression has a series."""
        await until(lambda: self.count(f"count({expression})"), f"{self.name}: {told}")

    async def quiet(self) -> None:
        """Until Prometheus has scraped all and no alert is even pending."""
        pods = len(self.pods)
        workers = self.setup.routers * self.setup.engines
        await self.until(f"sum(up{{FLEET}}) == {pods}", "all pods are scraped")
        await self.until(
            f"sum(kvroute_ready{{FLEET}}) == {self.setup.routers}", "routers are ready"
        )
        await self.until(f"sum(kvroute_worker_up{{FLEET}}) >= {workers}", "workers are up")

        async def silent() -> bool:
            return not (await self.prometheus.alerts(self.name)).keys() - BUSY

        await until(silent, f"{self.name}: no alert")

    # --- the start --------------------------------------------------------------------------------

    async def start(self, chart: helm.Chart, stack: AsyncExitStack) -> None:
        setup = self.setup
        stack.push_async_callback(self._end)
        (self.folder / "nats").mkdir()
        self.nats = await stack.enter_async_context(nats_server(self.folder / "nats", setup.users))
        await self._start_engines(stack)
        self._render(chart)
        self.pods = [self.release.router_pod(f"router-{i}") for i in range(setup.routers)]
        for pod in self.pods:
            config = self.release.configuration(pod)
            for model in config["models"]:
                if model["prompts"]["folder"] == TOKENS:
                    model["prompts"]["folder"] = str(make_folder(self.folder / "tokens"))
            config["nats"] = self._nats("router", self.nats_wires[:1])
            (self.folder / f"{pod.name}.yaml").write_text(yaml.safe_dump(config))
            self.routers.append(
                self.run(
                    pod.name, *setup.program, "--config", str(self.folder / f"{pod.name}.yaml")
                )
            )
        relay = Pod("engines-0", SCRAPED, "relay", {PORT_NAME: free_port()})
        self.write_relay("relay", relay.ports[PORT_NAME])
        self.relay = self.run_relay()
        self.pods.append(relay)
        if setup.gateway:
            self._start_gateway()
        await self._connect(stack)
        jobs = self.release.scrape_configs(self.pods, self.prometheus.factor)
        rules = divided_rules(self.release.rules, self.prometheus.factor)
        await self.prometheus.watch(self.name, jobs, rules)
        stack.push_async_callback(self.prometheus.forget, self.name)
        await self.quiet()

    def _render(self, chart: helm.Chart) -> None:
        config = {
            "fleet": {"name": self.name},
            "nats": {"url": self.nats.url},
            "gateway": {"listen": "[::]:8080"},
            "requests": {"drain_timeout_s": 1, "accept_after_stop_s": 1},
        }
        values = {
            "replicaCount": self.setup.routers,
            "config": merged(config, self.setup.config),
            "serviceMonitor": {"enabled": True},
            "relayMonitor": {"enabled": True, "matchLabels": SCRAPED, "port": PORT_NAME},
            "prometheusRule": {"enabled": True},
        }
        self.release = Release(chart, values, self.folder)
        if self.setup.limits:
            file = self.folder / "etc" / "kvroute-keys" / "keys.yaml"
            keys = yaml.safe_load(file.read_text())
            keys["identities"][0]["limits"] = dict(self.setup.limits)
            file.write_text(yaml.safe_dump(keys))

    def _nats(self, user: str, wires: list[Proxy]) -> dict[str, str]:
        known = {"user": user, "password": user} if self.setup.users else {}
        port = wires[0].port if wires else self.nats.port
        return {"url": f"nats://127.0.0.1:{port}", **known}

    async def _start_engines(self, stack: AsyncExitStack) -> None:
        setup = self.setup
        (self.folder / "fails").mkdir()
        self.fail(setup.fails)
        out = self.folder / "engines.json"
        self.engines = self.run(
            *("engines", "tests.scraped.engines", "--count", str(setup.engines)),
            *("--blocks", str(setup.blocks), "--slots", str(setup.slots)),
            *("--speed", str(setup.speed), "--fails", str(self.folder / "fails")),
            *("--out", str(out)),
        )
        await until(out.exists, f"{self.name}: engines")
        more = [*setup.workers, *([{}] * setup.engines)]
        engines = msgspec.json.decode(out.read_bytes())
        self.workers = [one | own for one, own in zip(engines, more, strict=False)]
        for one in self.workers[setup.engines - setup.pods :]:
            self._found(one)
        if setup.wired:
            for _ in range(2):
                proxy = await stack.enter_async_context(proxy_to(self.nats.port))
                self.nats_wires.append(proxy)
            for one in self.workers:
                port = int(one["events"].rpartition(":")[2])
                self.event_wires.append(await stack.enter_async_context(proxy_to(port)))
                one["events"] = f"tcp://127.0.0.1:{self.event_wires[-1].port}"

    def _start_gateway(self) -> None:
        folder, port = self.folder, free_port()
        (folder / "ca.crt").write_bytes(self.release.ca)
        (folder / "token").write_text(self.release.token)
        config = {
            "router": ",".join(
                f"localhost:{self.router_port('grpc', i)}" for i in range(self.setup.routers)
            ),
            "to_router": {"ca_file": str(folder / "ca.crt"), "token_file": str(folder / "token")},
            "gateway": {"listen": f"127.0.0.1:{port}"},
            "log": {"format": "plain"},
        }
        (folder / "gateway.yaml").write_text(yaml.safe_dump(config))
        self.gateway = self.run(
            "gateway", "router.app.main", "gateway", "--config", str(folder / "gateway.yaml")
        )
        self.gateway_pod = Pod("gateway-0", SCRAPED, "gateway", {PORT_NAME: port})
        self.pods.append(self.gateway_pod)

    def client_of(self, *routers: int) -> KvRouteClient:
        """A client of these routers."""
        return KvRouteClient(
            [f"localhost:{self.router_port('grpc', i)}" for i in routers],
            credentials=grpc.ssl_channel_credentials(self.release.ca),
            token=self.release.token,
            timeout_s=60.0,
            report_timeout_s=60.0,
            fallback=False,
        )

    async def _connect(self, stack: AsyncExitStack) -> None:
        self.client = await stack.enter_async_context(self.client_of(0))
        connector = aiohttp.TCPConnector(ssl=client_context(self.release.ca), limit=0)
        if "picker" in self.pods[0].ports:
            target = f"localhost:{self.router_port('picker')}"
            credentials = grpc.ssl_channel_credentials(self.release.ca)
            channel = grpc.aio.secure_channel(target, credentials)
            self.picker = await stack.enter_async_context(channel)
        self.http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def _end(self) -> None:
        """Also of processes that were stopped by a story."""
        named = ("engines", "relay", "second", "gateway")
        children = [*self.routers, *(vars(self)[name] for name in named if name in vars(self))]
        for child in children:
            child.send_signal(signal.SIGCONT)
        await asyncio.gather(*map(end, children))


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Values with more of them, as Helm merges them."""
    found = dict(values)
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


async def until(condition: Callable[[], Any], told: str, seconds: float = LIMIT_S) -> None:
    """Waits for what other processes bring about: a condition, or one that is awaited."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                found = condition()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return
                await asyncio.sleep(0.25)
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s in vain for: {told}") from None


@asynccontextmanager
async def a_fleet(
    name: str, setup: Setup, folder: Path, prometheus: Prometheus, found: Found = print
) -> AsyncIterator[Fleet]:
    """Everything up, scraped, and without an alert. folder: for its files. found: gets the settings
    of engines that have no relay here."""
    own = folder / name
    own.mkdir()
    fleet = Fleet(name, setup, own, prometheus, found)
    async with AsyncExitStack() as stack:
        with helm.Chart.load(CHART) as chart:
            await fleet.start(chart, stack)
        yield fleet


def stop(child: Child) -> None:
    """Has a process hang."""
    os.kill(child.pid, signal.SIGSTOP)
