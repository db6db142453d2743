"""A copy of the pods that match a selector, kept by list and watch. Pure: bytes in, changes out.

    list, page by page ──> watch from the list's version ──> events, bookmarks
         ^                          │ ended: watch again from the last version
         └──── 410 Gone, resync ────┘ failed: the same, after a back-off

Laws:
- after a list, the copy has the list's pods and no others, whatever was missed before;
- a version is only followed by a later one of the same watch, or by a list's;
- after each failure in a row the pause is longer, up to PAUSE_MAX_S, and no pod changes;
- pods_max pods are kept at most; further ones are counted.

Source: Kubernetes API concepts, "Efficient detection of changes" and "Retrieving large results
sets in chunks".
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct
from typing_extensions import override

PAGE_ITEMS = 250
"""Pods of a page: 10 to 30 KB each, so that a page stays below 10 MB."""
WATCH_S = 60.0
"""Seconds after which the server is to end a watch: half-open connections are noticed by then."""
STEADY_S = 1.0
"""Seconds; a watch that ended sooner, without any event, counts as a failure."""
RESYNC_S = 600.0
"""Seconds after which a list is read once more, so that no error lasts."""
PAUSE_S = 0.25
"""Pause after the first failure; doubles with each further failure in a row."""
PAUSE_MAX_S = 30.0
REASON_CHARS = 300
GONE = 410

Text = Annotated[str, Meta(max_length=4096)]


class _Metadata(Struct, frozen=True, rename="camel"):
    name: Text = ""
    uid: Text = ""
    resource_version: Text = ""
    deletion_timestamp: Text | None = None
    labels: dict[Text, Text] | None = None
    annotations: dict[str, str] | None = None


class _Condition(Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""


class _Spec(Struct, frozen=True, rename="camel"):
    node_name: Text = ""


class _Status(Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: Text = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] | None = None


class _Pod(Struct, frozen=True, rename="camel"):
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _ListMetadata(Struct, frozen=True, rename="camel"):
    resource_version: Text = ""
    continue_: Text | None = msgspec.field(default=None, name="continue")


class _List(Struct):
    metadata: _ListMetadata
    items: list[Raw] | None = None


class _Event(Struct):
    type: str
    object: Raw


class _Trouble(Struct):
    code: int = 0
    message: str = ""


_read_list = msgspec.json.Decoder(_List).decode
_read_event = msgspec.json.Decoder(_Event).decode
_read_pod = msgspec.json.Decoder(_Pod).decode
_read_trouble = msgspec.json.Decoder(_Trouble).decode


class Pod(NamedTuple):
    """The fields of a pod that discovery uses."""

    name: str
    uid: str
    """Another pod of the same name has another uid."""
    ip: str
    """Empty until the pod has one."""
    node: str
    ready: bool
    """Whether the kubelet calls the pod ready, and its deletion was not requested."""
    leaving: bool
    """Whether the pod's deletion was requested."""
    ended: bool
    """Whether all containers of the pod have ended for good."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    """The pod's annotations whose name begins with ANNOTATION."""


ANNOTATION = "kvroute.io/"


class List(NamedTuple):
    """Next step: read a page of the list; continue_token is empty for the first page."""

    continue_token: str


class Watch(NamedTuple):
    """Next step: watch from this version on."""

    version: str


class Pause(NamedTuple):
    """Next step: wait."""

    seconds: float


class Put(NamedTuple):
    """Change: a pod is new, or differs."""

    pod: Pod


class Gone(NamedTuple):
    """Change: a pod was removed."""

    pod: Pod


Change = Put | Gone


@dataclass
class WatchedPods:
    """The copy of the pods, and the next step to update it."""

    rng: random.Random
    pods_max: int
    pods: dict[str, Pod] = field(default_factory=dict)
    """Pods that are there, by name; pods_max at most."""
    counts: Counter[str] = field(default_factory=Counter)
    """Lists that were read to their end (`list`), events by type, and failures: `unreadable` pods
    and lines, `too_many` pods, `gone` versions, `failed` requests, `cut` watches."""
    failures: int = 0
    """Failures in a row."""
    trouble: str = ""
    """Why the last request to Kubernetes failed; empty: it did not."""
    listed: bool = False
    """Whether a list was ever read to its end."""
    _version: str = ""
    """Version from which the next watch begins; empty: a list is due."""
    _token: str = ""
    """Token of the list's next page; empty: the first page."""
    _fresh: dict[str, Pod] = field(default_factory=dict)
    """The pods of the list's pages so far."""
    _listed_at_s: float = -inf
    _watching_since_s: float = inf
    _heard: bool = False
    """Whether the watch under way brought anything."""
    _pause_s: float = 0.0

    @override
    def __repr__(self) -> str:
        return f"<WatchedPods {len(self.pods)} pods, {self.trouble or 'in step'}>"

    def next(self, now_s: float) -> List | Watch | Pause:
        """The next step to take now."""
        if self._pause_s:
            pause_s, self._pause_s = self._pause_s, 0.0
            return Pause(pause_s)
        if self._version and now_s - self._listed_at_s >= RESYNC_S:
            self._begin_list()
        if not self._version:
            return List(self._token)
        self._watching_since_s, self._heard = now_s, False
        return Watch(self._version)

    @property
    def watching(self) -> bool:
        """Whether the open watch is still of use; False: a list is due."""
        return bool(self._version)

    def begin_again(self) -> None:
        """Makes a list the next step, at once, since the selector has changed."""
        self._begin_list()
        self._pause_s, self.failures = 0.0, 0

    def on_page(self, body: bytes, now_s: float) -> Sequence[Change]:
        """Applies a page of the list; returns the changes."""
        try:
            page = _read_list(body)
        except (msgspec.DecodeError, RecursionError) as error:
            self._begin_list()
            self._fail(f"the list of pods can't be read: {error}", "unreadable")
            return ()
        for item in page.items or ():
            if (pod := self._pod(item)) is not None:
                self._keep(self._fresh, pod)
        self._token = page.metadata.continue_ or ""
        if self._token:
            return ()
        self.counts["list"] += 1
        self.listed = True
        self._listed_at_s = now_s
        self._version = page.metadata.resource_version
        self._well()
        before, self.pods, self._fresh = self.pods, self._fresh, {}
        gone = [Gone(pod) for name, pod in before.items() if name not in self.pods]
        put = [Put(pod) for name, pod in self.pods.items() if before.get(name) != pod]
        return [*gone, *put]

    def on_open(self) -> None:
        """Records that the server accepted the watch. Until an event comes, earlier failures go on
        to lengthen the next pause.
        """
        self.trouble = ""

    def on_line(self, line: bytes) -> Sequence[Change]:
        """Applies a line of the watch, an event; returns the changes."""
        try:
            event = _read_event(line)
        except (msgspec.DecodeError, RecursionError):
            self.counts["unreadable"] += 1
            return ()
        self._heard = True
        if event.type == "ERROR":
            return self._on_error(event.object)
        pod = self._pod(event.object)
        if pod is None:
            return ()
        self.counts[event.type.lower() if event.type in _TYPES else "unreadable"] += 1
        self._well()
        if event.type == "DELETED":
            known = self.pods.pop(pod.name, None)
            return () if known is None else (Gone(known),)
        if event.type not in _TYPES or self.pods.get(pod.name) == pod:
            return ()
        return (Put(pod),) if self._keep(self.pods, pod) else ()

    def on_end(self, now_s: float, *, cut: bool = False) -> None:
        """Records the end of the watch; cut: in the middle of a line."""
        if cut:
            self.counts["cut"] += 1
        if not self._version:
            return  # a list is due: the error that said so came before
        if cut or (not self._heard and now_s - self._watching_since_s < STEADY_S):
            self._fail(
                "the watch of pods ended at once" if not cut else "the watch of pods broke off",
                "failed",
            )

    def on_failure(self, status: int | None, reason: str, wait_s: float = 0.0) -> None:
        """Records a list or watch that failed. wait_s: pause that the server wants."""
        if status == GONE:
            self.counts["gone"] += 1
            self._begin_list()
        elif not self._version:
            self._begin_list()  # a list's pages belong together
        self._fail(reason, "failed")
        self._pause_s = max(self._pause_s, min(wait_s, PAUSE_MAX_S))

    def _on_error(self, document: Raw) -> Sequence[Change]:
        try:
            trouble = _read_trouble(document)
        except (msgspec.DecodeError, RecursionError):
            trouble = _Trouble(message="its error can't be read")
        if trouble.code == GONE:
            self.counts["gone"] += 1
            if self._version:
                self._begin_list()  # at once, the first time; a list that fails has its pause
            return ()
        self._begin_list()
        self._fail(f"the watch of pods ended with {trouble.code}: {trouble.message}", "failed")
        return ()

    def _begin_list(self) -> None:
        self._version = self._token = ""
        self._fresh = {}

    def _well(self) -> None:
        self.failures, self.trouble, self._pause_s = 0, "", 0.0

    def _fail(self, reason: str, kind: str) -> None:
        self.counts[kind] += 1
        self.failures += 1
        self.trouble = reason[:REASON_CHARS]
        longest_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(self.failures - 1, 16))
        self._pause_s = longest_s * self.rng.uniform(0.5, 1.0)

    def _keep(self, pods: dict[str, Pod], pod: Pod) -> bool:
        if pod.name not in pods and len(pods) >= self.pods_max:
            self.counts["too_many"] += 1
            return False
        pods[pod.name] = pod
        return True

    def _pod(self, document: Raw) -> Pod | None:
        """Reads a pod, whose version becomes that of the watch; None: the document is unreadable,
        or a bookmark."""
        try:
            read = _read_pod(document)
        except (msgspec.DecodeError, RecursionError):
            self.counts["unreadable"] += 1
            return None
        metadata = read.metadata
        if self._version and metadata.resource_version:
            self._version = metadata.resource_version
        if not metadata.name:
            self.counts["bookmark"] += 1
            return None
        leaving = metadata.deletion_timestamp is not None
        conditions = read.status.conditions or ()
        ready = _is_ready({each.type: each for each in conditions})
        annotations = metadata.annotations or {}
        return Pod(
            metadata.name,
            metadata.uid,
            read.status.pod_ip,
            read.spec.node_name,
            ready and not leaving,
            leaving,
            read.status.phase in ("Succeeded", "Failed"),
            metadata.labels or {},
            {key: value for key, value in annotations.items() if key.startswith(ANNOTATION)},
        )


def _is_ready(conditions: Mapping[str, _Condition]) -> bool:
    """Whether the kubelet calls a pod ready.

    The node controller turns Ready to False where a node was silent for 40 s, as after an API
    server that was away: then it is all pods at once. It leaves the reason empty, which the kubelet
    never does, and ContainersReady as it is (MarkPodsNotReady and GeneratePodReadyCondition of
    Kubernetes 1.34). Such a pod counts as ready here: its relay sees whether its engine answers.
    """
    ready = conditions.get("Ready", _Condition())
    containers = conditions.get("ContainersReady", _Condition())
    is_guess = ready.status == "False" and not ready.reason and containers.status == "True"
    return ready.status == "True" or is_guess


_TYPES = frozenset({"ADDED", "MODIFIED", "DELETED"})
