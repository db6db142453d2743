"""Runs discovery: awaits Kubernetes and engines, calls the pure modules, and performs the effects
that these return.

Law: nothing here can end the router. A request that fails is counted, logged when its reason is
new, and sent again after a back-off; pods stay as they were last seen.
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import aiohttp
import msgspec

from events.engines.access import EngineAccess
from events.engines.pages.probe import EngineHttp, EngineSilent
from events.engines.sessions import http_session
from events.engines.table import ENGINES, READINGS
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor
from router.cluster.discovery.api import (
    ACCOUNT_FOLDER,
    ApiFailed,
    KubernetesApi,
    LineCut,
    ServiceAccount,
)
from router.cluster.discovery.followed import (
    Effect,
    FollowedPods,
    Forget,
    Identify,
    Leave,
    Start,
    Workers,
)
from router.cluster.discovery.pods import Plan
from router.cluster.discovery.watched import (
    ANNOTATION,
    PAGE_ITEMS,
    REASON_CHARS,
    WATCH_S,
    List,
    Pause,
    WatchedPods,
)
from router.config.settings.discovery_settings import KubernetesSettings
from router.request.refusal import Refusal

STEP_S = 0.25
POOL_S = 10.0
"""Seconds between two reads of the InferencePool."""
PODS_MAX = 1024
"""Pods known at once; more are ignored, and counted."""
ZONE_LABEL = "topology.kubernetes.io/zone"
"""Label of a node that names its zone, as clouds set it."""
NODES_MAX = 8192
"""Nodes whose labels are kept."""
NODE_S = 2.0
"""Longest wait of a new relay for the labels of its pod's node, seconds."""
NO_ADDRESS = (
    "discovery.kubernetes.enabled: there is no Kubernetes API here, since KUBERNETES_SERVICE_HOST"
    " is not set; set discovery.kubernetes.api"
)

log = logging.getLogger("kvroute.discovery")


class Hands(Workers, Protocol):
    """Interface: the actions of the router that discovery calls."""

    def access(self, worker_id: str, address: str) -> EngineAccess:
        """Credentials for an engine at this address."""

    def start(self, settings: EngineSettings) -> str:
        """Runs a relay; returns why it can't, or an empty text. Raises Refusal where there is no
        room for it."""

    def leave(self, worker_id: str, reason: str) -> None:
        """Stops a relay."""

    def forget(self, worker_id: str) -> None:
        """Stops a relay, and forgets its worker."""

    def hold(self, held: frozenset[str]) -> None:
        """Sends no requests to these workers from now on; workers of the last call get requests
        again.
        """


class _Card(msgspec.Struct):
    owned_by: str = ""


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class _PoolPort(msgspec.Struct):
    number: int


class _PoolSelector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _PoolSelector
    target_ports: list[_PoolPort]


class _Pool(msgspec.Struct):
    spec: _PoolSpec


class _NodeMetadata(msgspec.Struct):
    labels: dict[str, str] | None = None


class _Node(msgspec.Struct):
    metadata: _NodeMetadata


class NoApi(ValueError):
    """Pods can't be watched as configured; the message is a sentence."""


class KubernetesDiscovery:
    """Watches the pods of one namespace, and runs their relays."""

    def __init__(
        self,
        settings: KubernetesSettings,
        hands: Hands,
        *,
        replica: str,
        copied_labels: Sequence[str],
        clock: Callable[[], float],
        rng: random.Random,
        account_folder: Path = ACCOUNT_FOLDER,
    ) -> None:
        """copied_labels: names of pods' labels that their workers have, too. Raises NoApi."""
        if bool(settings.selector) == bool(settings.pool):
            raise NoApi("discovery.kubernetes needs either a selector or a pool, and not both")
        self.settings = settings
        self._hands = hands
        self._clock = clock
        account = ServiceAccount(account_folder)
        self._api = KubernetesApi(settings.api or _cluster(os.environ), account)
        try:
            self._namespace = settings.namespace or account.namespace()
        except OSError:
            raise NoApi(
                "discovery.kubernetes.namespace is empty, and the service account's folder"
                f" {account_folder} names no namespace"
            ) from None
        self.watched = WatchedPods(rng, PODS_MAX)
        self.followed = FollowedPods(
            Plan(settings.ports, settings.events_port, settings.replay_port, copied_labels),
            replica,
        )
        self.counts: Counter[str] = Counter()
        """Failed reads of the InferencePool (`pool`) and of nodes (`nodes`), and relays that could
        not be started for want of room (`no_room`)."""
        self.in_step = False
        """Whether a watch of the pods is open, so that their known state is the present one."""
        self._selector = settings.selector
        self._nodes: dict[str, Mapping[str, str]] = {}
        self._said: dict[str, str] = {}
        """The trouble logged last, by subject: pods, pool or nodes."""
        self._said_of: Mapping[str, str] = {}
        """The trouble logged last of each worker or pod without a relay, by worker id or pod."""
        self._changed = asyncio.Event()
        self._supervisor = Supervisor("discovery of pods", rng)
        self._session: aiohttp.ClientSession | None = None
        self._following: asyncio.Task[None] | None = None

    def settled(self, known: Callable[[str], bool]) -> bool:
        """Whether every ready pod's worker is known. known: returns whether a worker id is."""
        return self.watched.listed and all(known(name) for name in self.followed.ready())

    def trouble(self) -> str:
        """Sentence that says why pods can't be watched; empty: they can."""
        return self._said.get("pool", "") or self.watched.trouble

    def start(self) -> None:
        self._session = http_session()
        _ = self._supervisor.keep(self._steps, "steps")
        if self.settings.pool:
            _ = self._supervisor.keep(self._follow_pool, "pool")
        else:
            self._following = self._supervisor.keep(self._follow, "watch")

    async def stop(self) -> None:
        """Ends all tasks; stopping the relays is up to their owner."""
        await self._supervisor.close()
        await self._api.close()
        if self._session is not None:
            await self._session.close()

    async def _follow(self) -> None:
        """Keeps the copy of the pods, for ever."""
        path = f"/api/v1/namespaces/{quote(self._namespace)}/pods"
        while True:
            match self.watched.next(self._clock()):
                case Pause(seconds):
                    self._say("pods", self.watched.trouble)
                    await asyncio.sleep(seconds)
                case List(token):
                    await self._list(path, token)
                case watch:
                    await self._watch(path, watch.version)

    async def _list(self, path: str, token: str) -> None:
        query = {"labelSelector": self._selector, "limit": str(PAGE_ITEMS)}
        if token:
            query["continue"] = token
        try:
            body = await self._api.get(path, query, "list pods")
        except ApiFailed as error:
            self.watched.on_failure(error.status, str(error), error.wait_s)
            return
        self._came(self.followed.on_changes(self.watched.on_page(body, self._clock())))

    async def _watch(self, path: str, version: str) -> None:
        query = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": f"{WATCH_S:.0f}",
        }
        lines = self._api.watch(path, query, WATCH_S, "watch pods", self._opened)
        try:
            async with aclosing(lines):
                async for line in lines:
                    self._came(self.followed.on_changes(self.watched.on_line(line)))
                    if not self.watched.watching:
                        break
        except ApiFailed as error:
            self.watched.on_failure(error.status, str(error), error.wait_s)
        except LineCut:
            self.watched.on_end(self._clock(), cut=True)
        else:
            self.watched.on_end(self._clock())
        finally:
            self.in_step = False

    def _opened(self) -> None:
        self.in_step = True
        self.watched.on_open()
        self._say("pods", "")

    def _came(self, effects: list[Effect]) -> None:
        self._perform(effects)
        self._hands.hold(self.followed.held())
        self._changed.set()

    async def _steps(self) -> None:
        """Takes the next steps, at every change and every STEP_S."""
        while True:
            self._perform(self.followed.step(self._hands, self._clock()))
            self._hands.hold(self.followed.held())
            self._say_of_pods(self.followed.troubles())
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(STEP_S):
                    await self._changed.wait()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Identify():
                    _ = self._supervisor.once(partial(self._identify, effect), "identity")
                case Start(settings):
                    self._start(settings)
                case Leave(worker_id, reason):
                    log.info("worker %s has another relay: this router's is stopped", worker_id)
                    self._hands.leave(worker_id, reason)
                case Forget(worker_id):
                    log.info("the pod of worker %s is gone", worker_id)
                    self._hands.forget(worker_id)

    def _start(self, settings: EngineSettings) -> None:
        failed = True
        try:
            why, failed = self._hands.start(settings), False
        except Refusal as error:
            self.counts["no_room"] += 1
            why = error.message
        except Exception as error:  # of that pod alone
            why = repr(error)[:REASON_CHARS]
        self.followed.on_started(settings.id, why, self._clock(), failed=failed)
        if not why:
            log.info("pod of worker %s: followed at %s", settings.id, settings.address)

    async def _identify(self, wanted: Identify) -> None:
        """Gets an engine's kind from the owners in its list of models, and its node's labels."""
        kind, why, labels = None, "", {}
        try:
            kind = await self._kind(wanted)
            labels = dict(await self._labels(wanted.pod.node))
        except EngineSilent as error:
            why = str(error)
        except Exception as error:  # of that pod alone, which has another turn after a pause
            why = repr(error)[:REASON_CHARS]
        finally:
            self.followed.on_identified(
                wanted.endpoint, wanted.pod, kind, labels, why, self._clock()
            )
            self._changed.set()

    async def _kind(self, wanted: Identify) -> str:
        if self._session is None:
            raise EngineSilent("discovery has ended")
        access = self._hands.access(wanted.endpoint.worker_id, wanted.endpoint.address)
        page = await EngineHttp(self._session, access).page("/v1/models")
        try:
            owners = {card.owned_by for card in msgspec.json.decode(page, type=_Cards).data}
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineSilent(f"/v1/models of the engine can't be read: {error}") from None
        named = wanted.pod.annotations.get(f"{ANNOTATION}engine")
        for name in READINGS:
            if ENGINES[name].owned_by in owners:
                return name
        if named in READINGS:
            return named
        known = " nor ".join(ENGINES[name].title for name in READINGS)
        raise EngineSilent(f"/v1/models: by the owners of its models the engine is neither {known}")

    async def _labels(self, node: str) -> Mapping[str, str]:
        """Zone and rack of a node; empty if they are not read, or can't be."""
        if not self.settings.rack_label or not node:
            return {}
        if node not in self._nodes:
            try:
                async with asyncio.timeout(NODE_S):
                    body = await self._api.get(f"/api/v1/nodes/{quote(node)}", {}, "get nodes")
                said = msgspec.json.decode(body, type=_Node).metadata.labels or {}
            except (ApiFailed, TimeoutError, msgspec.DecodeError, RecursionError) as error:
                self.counts["nodes"] += 1
                self._say("nodes", str(error)[:REASON_CHARS] or "get nodes: no answer in time")
                return {}
            self._say("nodes", "")
            if len(self._nodes) >= NODES_MAX:
                self._nodes.clear()
            wanted = (("zone", ZONE_LABEL), ("rack", self.settings.rack_label))
            self._nodes[node] = {name: said[label] for name, label in wanted if label in said}
        return self._nodes[node]

    async def _follow_pool(self) -> None:
        """Reads selector and ports from the InferencePool every POOL_S, for ever."""
        group = "/apis/inference.networking.k8s.io/v1"
        path = f"{group}/namespaces/{quote(self._namespace)}/inferencepools/{self.settings.pool}"
        while True:
            try:
                body = await self._api.get(path, {}, "get inferencepools")
                spec = msgspec.json.decode(body, type=_Pool).spec
                self._use_pool(spec)
                self._say("pool", "")
            except (ApiFailed, msgspec.DecodeError, RecursionError) as error:
                self.counts["pool"] += 1
                self._say("pool", str(error)[:REASON_CHARS])
            await asyncio.sleep(POOL_S if self._selector else STEP_S * 4)

    def _use_pool(self, spec: _PoolSpec) -> None:
        selector = ",".join(f"{k}={v}" for k, v in sorted(spec.selector.match_labels.items()))
        ports = tuple(port.number for port in spec.target_ports)
        if not selector or not ports:
            raise ApiFailed(
                f"InferencePool {self.settings.pool} needs spec.selector.matchLabels and"
                " spec.targetPorts; one of them is empty"
            )
        if (selector, ports) == (self._selector, tuple(self.followed.plan.ports)):
            return
        log.info("InferencePool %s: pods with %s, ports %s", self.settings.pool, selector, ports)
        self._came(self.followed.replan(self.followed.plan._replace(ports=ports)))
        self._selector = selector
        self.watched.begin_again()
        if self._following is not None:  # its watch has the selector of before
            self._following.cancel()
        self._following = self._supervisor.keep(self._follow, "watch")

    def _say_of_pods(self, troubles: Mapping[str, str]) -> None:
        for worker_id, why in troubles.items():
            if self._said_of.get(worker_id) != why:
                log.warning("pod of worker %s has no relay: %s", worker_id, why)
        self._said_of = troubles

    def _say(self, subject: str, why: str) -> None:
        """Logs a trouble when it is new, and its end."""
        before = self._said.get(subject, "")
        if why == before:
            return
        if why:
            self._said[subject] = why
            log.warning("%s: %s", subject, why)
        else:
            self._said.pop(subject, None)
            log.info("%s: in order again", subject)


def _cluster(environment: Mapping[str, str]) -> str:
    """The API's URL from the environment variables that every pod has; raises NoApi."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise NoApi(NO_ADDRESS)
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
