"""Decides which pods get a relay here, which get no requests, and which are forgotten. Pure.

Laws:
- a pod gets a relay once it was ready, and keeps it until the pod is gone or its ports change: an
  engine that is not ready for a while loses none of its blocks in the index;
- a pod that is not ready, or on its way out, gets no requests, whichever relay speaks for it;
- a worker that is gone is forgotten at once, and its messages are ignored for TOMBSTONE_S;
- a worker for which another relay beats gets no relay here: relays beside engines come first;
- of the routers of a fleet, one follows a pod: the first in an order by a hash of router and pod,
  and each next one only when no relay has beaten for the pod for a while. Of two relays, the one
  with the higher epoch stays;
- a pod that can't be followed, whatever its annotations are, has a trouble, a sentence that says
  why, and does not affect other pods: the router's readiness does not wait for its worker either.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import NamedTuple, Protocol

from typing_extensions import override

from events.plane.settings import EngineSettings, UnusableEngine
from router.cluster.discovery.pods import Endpoint, Plan, endpoints, settings_of
from router.cluster.discovery.watched import Change, Gone, Pod, Put

TAKEOVER_S = 2.0
"""Seconds; the n-th router waits n times as long for the beats of a router before it."""
TOMBSTONE_S = 5.0
"""Seconds for which messages of a worker whose pod is gone are ignored: longer than the relays of
other replicas take to see that it is gone."""
IDENTIFYING_MAX = 32
"""Engines whose kind is requested at the same time."""
ASK_S = 0.5
"""Pause after the first failure to learn an engine's kind, or to start its relay; doubles with each
further one."""
ASK_MAX_S = 10.0
WHY_CHARS = 300
"""Characters that are kept of an unexpected error."""


class Workers(Protocol):
    """Interface: what this router knows of workers and its own relays."""

    def look(self) -> None:
        """Reads the fleet's present state, from which the other methods answer until the next call;
        called before each step."""

    def running(self, worker_id: str) -> bool:
        """Whether this router runs a relay of discovery for a worker."""

    def elsewhere(self, worker_id: str, address: str) -> bool:
        """Whether another relay, with a higher epoch than ours if ours runs, sends heartbeats for a
        worker with this id or address.
        """

    def others(self) -> Collection[str]:
        """Names of the fleet's other replicas."""

    def removed(self, worker_id: str) -> bool:
        """Whether an operator's removal of a worker is in force."""


class Identify(NamedTuple):
    """Effect: get an engine's kind from its pages, and its node's labels."""

    endpoint: Endpoint
    pod: Pod


class Start(NamedTuple):
    """Effect: run a relay."""

    settings: EngineSettings


class Leave(NamedTuple):
    """Effect: stop a relay; the worker stays known."""

    worker_id: str
    reason: str


class Forget(NamedTuple):
    """Effect: stop the relay if there is one, and forget the worker."""

    worker_id: str


Effect = Identify | Start | Leave | Forget


@dataclass(eq=False, slots=True)
class _Worker:
    """One worker of a pod."""

    pod: Pod
    endpoint: Endpoint
    was_ready: bool = False
    alone_since_s: float = inf
    """Time since which no relay beats for the worker, though its pod was ready; inf: one does."""
    settings: EngineSettings | None = None
    asking: bool = False
    try_at_s: float = 0.0
    """When the engine may be identified, or the relay started."""
    failures: int = 0
    trouble: str = ""
    """Why the worker has no relay, as a sentence; empty: it has one, or needs none here."""
    unusable: bool = False
    """Whether the pod's annotations cause the trouble, so that readiness does not wait for it."""


@dataclass
class FollowedPods:
    """The workers of all pods, and what this router has to do about them."""

    plan: Plan
    replica: str
    """This router's name among the fleet's replicas."""
    counts: Counter[str] = field(default_factory=Counter)
    """Workers that were `started`, `left` to another relay, `gone`; engines that did not say their
    kind (`silent`), and pods with `unusable` annotations."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    """Workers of all pods, by worker id."""
    _of_pod: dict[str, list[str]] = field(default_factory=dict)
    """Pod name -> worker ids."""
    _unusable: dict[str, tuple[Pod, str]] = field(default_factory=dict)
    """Pod name -> the pod, and why it has no workers, as a sentence."""

    @override
    def __repr__(self) -> str:
        return f"<FollowedPods {len(self._workers)} workers, {len(self.held())} held>"

    def __len__(self) -> int:
        return len(self._workers)

    def held(self) -> frozenset[str]:
        """Ids of workers whose pods are not ready, so that they get no requests."""
        return frozenset(name for name, each in self._workers.items() if not each.pod.ready)

    def ready(self) -> list[str]:
        """Ids of workers whose pods are ready, and usable."""
        return [
            name for name, each in self._workers.items() if each.pod.ready and not each.unusable
        ]

    def troubles(self) -> Mapping[str, str]:
        """Worker id, or name of a pod without workers -> why it has no relay, as a sentence."""
        troubles = {name: each.trouble for name, each in self._workers.items() if each.trouble}
        return {name: why for name, (_, why) in self._unusable.items()} | troubles

    def replan(self, plan: Plan) -> list[Effect]:
        """Replaces the ports of pods; returns effects."""
        self.plan = plan
        pods = {each.pod.name: each.pod for each in self._workers.values()}
        pods |= {name: pod for name, (pod, _) in self._unusable.items()}
        return self.on_changes(map(Put, pods.values()))

    def on_changes(self, changes: Iterable[Change]) -> list[Effect]:
        """Applies new, changed and removed pods; returns effects."""
        effects: list[Effect] = []
        for change in changes:
            match change:
                case Put(pod):
                    self._unusable.pop(pod.name, None)
                    try:
                        effects += self._put(pod)
                    except Exception as error:  # of that pod alone
                        self.counts["unusable"] += 1
                        effects += self._drop(pod.name)
                        self._unusable[pod.name] = pod, _why(error)
                case Gone(pod):
                    dropped = self._drop(pod.name)
                    self._unusable.pop(pod.name, None)
                    effects += dropped
                    if dropped:  # whose names another pod may have wanted
                        others = [other for other, _ in self._unusable.values()]
                        effects += self.on_changes(map(Put, others))
        return effects

    def on_identified(
        self,
        endpoint: Endpoint,
        pod: Pod,
        kind: str | None,
        labels: Mapping[str, str],
        why: str,
        now_s: float,
    ) -> None:
        """Applies the result of an Identify: the engine's kind and its node's labels. kind None: it
        failed, and `why` says so as a sentence.
        """
        worker = self._workers.get(endpoint.worker_id)
        if worker is None or worker.pod.uid != pod.uid or worker.endpoint != endpoint:
            return  # another pod has its name by now
        worker.asking = False
        if kind is None:
            self.counts["silent"] += 1
            self._wait(worker, why, now_s)
            return
        try:
            worker.settings = settings_of(worker.pod, endpoint, self.plan, kind, labels)
        except Exception as error:  # of that pod alone
            self.counts["unusable"] += 1
            self._wait(worker, _why(error), now_s)
            worker.unusable = True
            return
        worker.failures, worker.trouble, worker.unusable = 0, "", False

    def step(self, workers: Workers, now_s: float) -> list[Effect]:
        """Decides which relays start or end now, and which engines are identified; returns these
        effects."""
        effects: list[Effect] = []
        room = IDENTIFYING_MAX - sum(each.asking for each in self._workers.values())
        workers.look()
        others = workers.others()
        for worker_id, worker in self._workers.items():
            if not worker.was_ready:
                continue
            elsewhere = workers.elsewhere(worker_id, worker.endpoint.address)
            if workers.running(worker_id):
                if elsewhere:
                    self.counts["left"] += 1
                    effects.append(Leave(worker_id, "other_relay"))
                continue
            if elsewhere or worker.pod.leaving or workers.removed(worker_id):
                worker.alone_since_s, worker.trouble = inf, ""
                continue
            worker.alone_since_s = min(worker.alone_since_s, now_s)
            if now_s - worker.alone_since_s < TAKEOVER_S * self._turn(worker_id, others):
                continue
            if now_s < worker.try_at_s:
                continue
            if worker.settings is not None:
                effects.append(Start(worker.settings))
            elif not worker.asking and room > 0:
                worker.asking, room = True, room - 1
                effects.append(Identify(worker.endpoint, worker.pod))
        return effects

    def on_started(self, worker_id: str, why: str, now_s: float, *, failed: bool) -> None:
        """Applies the result of a Start. why: why the relay can't run, as a sentence; empty: it
        runs. failed: False where the router alone is at fault, so that no pause grows."""
        worker = self._workers[worker_id]
        if why:
            if not failed:
                worker.failures = 0
            self._wait(worker, why, now_s)
            return
        self.counts["started"] += 1
        worker.failures, worker.trouble = 0, ""

    def _turn(self, worker_id: str, others: Collection[str]) -> int:
        """Number of routers that come before this one for a worker (rendezvous hashing)."""
        mine = _weight(self.replica, worker_id)
        return sum(_weight(other, worker_id) > mine for other in others)

    def _put(self, pod: Pod) -> list[Effect]:
        if pod.ended or not pod.ip:
            return self._drop(pod.name)
        effects: list[Effect] = []
        wanted = endpoints(pod, self.plan)
        self._check_names(pod, wanted)
        before = [self._workers[worker_id] for worker_id in self._of_pod.get(pod.name, ())]
        if before and (
            before[0].pod.uid != pod.uid or [each.endpoint for each in before] != wanted
        ):
            effects += self._drop(pod.name)
            before = []
        if not before:
            self._workers |= {each.worker_id: _Worker(pod, each) for each in wanted}
            self._of_pod[pod.name] = [endpoint.worker_id for endpoint in wanted]
        for worker_id in self._of_pod[pod.name]:
            worker = self._workers[worker_id]
            if worker.pod.annotations != pod.annotations and worker.settings is None:
                worker.try_at_s, worker.unusable = 0.0, False  # what was wrong may be right now
            worker.pod = pod
            worker.was_ready = worker.was_ready or pod.ready
        return effects

    def _check_names(self, pod: Pod, wanted: Sequence[Endpoint]) -> None:
        """Raises UnusableEngine where two workers would have one name."""
        seen: set[str] = set()
        for worker_id, _, _ in wanted:
            other = self._workers.get(worker_id)
            if worker_id in seen or (other is not None and other.pod.name != pod.name):
                raise UnusableEngine("", f"two workers would have the name {worker_id!r}")
            seen.add(worker_id)

    def _drop(self, pod: str) -> list[Effect]:
        effects: list[Effect] = []
        for worker_id in self._of_pod.pop(pod, ()):
            del self._workers[worker_id]
            self.counts["gone"] += 1
            effects.append(Forget(worker_id))
        return effects

    def _wait(self, worker: _Worker, why: str, now_s: float) -> None:
        worker.trouble = why
        worker.try_at_s = now_s + min(ASK_MAX_S, ASK_S * 2.0 ** min(worker.failures, 16))
        worker.failures += 1


def _why(error: Exception) -> str:
    """What is wrong with a pod, as a sentence; an unexpected error is named with its class."""
    return str(error) if isinstance(error, UnusableEngine) else repr(error)[:WHY_CHARS]


def _weight(replica: str, worker_id: str) -> bytes:
    return blake2b(f"{replica}\0{worker_id}".encode(), digest_size=8).digest()
