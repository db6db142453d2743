"""The copy of the pods: lists, events, bookmarks, 410 Gone, failures, without any socket."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from router.cluster.discovery.watched import (
    PAUSE_MAX_S,
    RESYNC_S,
    STEADY_S,
    Change,
    Gone,
    List,
    Pause,
    Pod,
    Put,
    Watch,
    WatchedPods,
)
from tests.stage.kubernetes import Object, pod


def watched(pods_max: int = 100) -> WatchedPods:
    return WatchedPods(random.Random(1), pods_max)


def page(*pods: Object, version: str = "100", token: str = "") -> bytes:
    metadata: dict[str, Any] = {"resourceVersion": version}
    if token:
        metadata["continue"] = token
    return json.dumps({"kind": "PodList", "metadata": metadata, "items": list(pods)}).encode()


def event(kind: str, document: Object, version: str = "") -> bytes:
    if version:
        document = {**document, "metadata": {**document["metadata"], "resourceVersion": version}}
    return json.dumps({"type": kind, "object": document}).encode()


def error(code: int) -> bytes:
    status = {"kind": "Status", "code": code, "message": "too old resource version: 1 (2)"}
    return json.dumps({"type": "ERROR", "object": status}).encode()


def listed(*pods: Object, pods_max: int = 100) -> WatchedPods:
    """After a list, with a watch under way."""
    copy = watched(pods_max)
    assert copy.next(0.0) == List("")
    copy.on_page(page(*pods), 0.0)
    assert copy.next(0.0) == Watch("100")
    return copy


def names(changes: Sequence[Change]) -> list[tuple[str, str]]:
    return [(type(change).__name__, change.pod.name) for change in changes]


def test_pages_count_only_together_and_the_watch_begins_at_the_lists_version() -> None:
    copy = watched()
    assert copy.next(0.0) == List("")
    assert copy.on_page(page(pod("a"), token="more"), 0.0) == ()
    assert not copy.pods
    assert not copy.listed
    assert copy.next(0.0) == List("more")
    assert names(copy.on_page(page(pod("b"), version="7"), 1.0)) == [("Put", "a"), ("Put", "b")]
    assert copy.next(1.0) == Watch("7")


def test_events_change_the_copy_and_move_the_version() -> None:
    copy = listed(pod("a"))
    assert names(copy.on_line(event("ADDED", pod("b"), "101"))) == [("Put", "b")]
    assert names(copy.on_line(event("MODIFIED", pod("b", ready=False), "102"))) == [("Put", "b")]
    assert names(copy.on_line(event("DELETED", pod("a"), "103"))) == [("Gone", "a")]
    assert list(copy.pods) == ["b"]
    copy.on_end(100.0)
    assert copy.next(100.0) == Watch("103")


def test_an_event_that_changes_nothing_of_use_is_no_change() -> None:
    copy = listed(pod("a"))
    assert copy.on_line(event("MODIFIED", pod("a", annotations={"x": "y"}), "101")) == ()
    assert copy.on_line(event("DELETED", pod("never-seen"), "102")) == ()


def test_bookmarks_move_the_version_and_nothing_else() -> None:
    copy = listed(pod("a"))
    bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "900"}}
    assert copy.on_line(event("BOOKMARK", bookmark)) == ()
    assert list(copy.pods) == ["a"]
    assert copy.counts["bookmark"] == 1
    copy.on_end(50.0)
    assert copy.next(50.0) == Watch("900")


def test_410_lists_again_at_once_and_the_list_makes_good_for_missed_events() -> None:
    copy = listed(pod("a"), pod("b"))
    assert copy.on_line(error(410)) == ()
    assert not copy.watching
    copy.on_end(10.0)
    assert copy.next(10.0) == List("")
    changes = copy.on_page(page(pod("b"), pod("c"), version="500"), 10.0)
    assert names(changes) == [("Gone", "a"), ("Put", "c")]
    assert copy.next(10.0) == Watch("500")
    assert copy.counts["gone"] == 1


def test_410_as_the_status_of_a_watch_or_of_a_page_lists_from_the_beginning() -> None:
    copy = listed(pod("a"))
    copy.on_failure(410, "watch pods: status 410")
    assert isinstance(copy.next(1.0), Pause)
    assert copy.next(1.0) == List("")
    copy.on_page(page(pod("a"), token="old"), 1.0)
    assert copy.next(1.0) == List("old")
    copy.on_failure(410, "list pods: status 410")
    assert isinstance(copy.next(2.0), Pause)
    assert copy.next(2.0) == List("")
    assert list(copy.pods) == ["a"]


def test_a_watch_that_ends_in_time_goes_on_without_a_pause() -> None:
    copy = listed(pod("a"))
    copy.on_end(STEADY_S + 60.0)
    assert copy.next(61.0) == Watch("100")
    assert copy.failures == 0


def test_a_watch_that_ends_at_once_or_in_the_middle_of_a_line_waits_and_goes_on() -> None:
    copy = listed(pod("a"))
    copy.on_end(0.1)
    assert isinstance(copy.next(0.1), Pause)
    assert copy.next(0.5) == Watch("100")
    copy.on_end(30.0, cut=True)
    assert isinstance(copy.next(30.0), Pause)
    assert copy.next(31.0) == Watch("100")
    assert copy.counts["cut"] == 1


def test_failures_in_a_row_wait_longer_up_to_a_bound_and_keep_the_pods() -> None:
    copy = listed(pod("a"))
    pauses = []
    for _ in range(20):
        copy.on_failure(None, "watch pods: Connection refused")
        step = copy.next(1.0)
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        assert copy.next(1.0) == Watch("100")
    assert pauses[0] <= 0.25
    assert max(pauses) <= PAUSE_MAX_S
    assert min(pauses[-3:]) >= PAUSE_MAX_S / 2
    assert list(copy.pods) == ["a"]
    assert "refused" in copy.trouble
    copy.on_line(event("ADDED", pod("b"), "101"))
    assert copy.trouble == ""
    assert copy.failures == 0


def test_a_server_that_names_a_wait_is_waited_for() -> None:
    copy = watched()
    copy.on_failure(429, "list pods: status 429", wait_s=7.0)
    assert copy.next(0.0) == Pause(7.0)
    copy.on_failure(429, "list pods: status 429", wait_s=9e9)
    assert copy.next(0.0) == Pause(PAUSE_MAX_S)


def test_lists_are_read_again_now_and_then() -> None:
    copy = listed(pod("a"))
    copy.on_end(RESYNC_S)
    assert copy.next(RESYNC_S) == List("")


def test_a_failed_page_begins_the_list_again() -> None:
    copy = watched()
    copy.on_page(page(pod("a"), token="more"), 0.0)
    copy.on_failure(500, "list pods: status 500")
    assert isinstance(copy.next(1.0), Pause)
    assert copy.next(1.0) == List("")
    assert names(copy.on_page(page(pod("b")), 1.0)) == [("Put", "b")]


def test_more_pods_than_the_bound_are_counted_and_not_kept() -> None:
    copy = listed(pod("a"), pod("b"), pod("c"), pods_max=2)
    assert list(copy.pods) == ["a", "b"]
    assert copy.counts["too_many"] == 1
    assert copy.on_line(event("ADDED", pod("d"), "101")) == ()
    assert names(copy.on_line(event("DELETED", pod("a"), "102"))) == [("Gone", "a")]
    assert names(copy.on_line(event("ADDED", pod("e"), "103"))) == [("Put", "e")]


@pytest.mark.parametrize(
    "line",
    [
        b"not JSON",
        b"[]",
        b'{"type":"ADDED"}',
        b'{"type":"ADDED","object":5}',
        b'{"type":"ADDED","object":{"metadata":{"name":7}}}',
        b'{"type":"ADDED","object":{"metadata":{"name":"a","labels":["x"]}}}',
        b'{"type":"OTHER","object":{"metadata":{"name":"a"}}}',
        b'{"type":"ADDED","object":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_line_that_can_not_be_read_is_counted_and_changes_nothing(line: bytes) -> None:
    copy = listed(pod("a"))
    assert copy.on_line(line) == ()
    assert copy.counts["unreadable"] == 1
    assert list(copy.pods) == ["a"]
    assert names(copy.on_line(event("ADDED", pod("b"), "101"))) == [("Put", "b")]


def test_a_pod_that_can_not_be_read_costs_its_list_nothing_else() -> None:
    copy = watched()
    broken = {"metadata": {"name": "b", "labels": 5}}
    assert names(copy.on_page(page(pod("a"), broken, pod("c")), 0.0)) == [
        ("Put", "a"),
        ("Put", "c"),
    ]
    assert copy.counts["unreadable"] == 1


def test_a_list_that_can_not_be_read_is_a_failure() -> None:
    copy = watched()
    assert copy.on_page(b"<html>", 0.0) == ()
    assert isinstance(copy.next(0.0), Pause)
    assert copy.next(0.0) == List("")
    assert not copy.listed


def test_what_is_used_of_a_pod() -> None:
    copy = listed(
        pod("a", annotations={"kvroute.io/slots": "64"}),
        pod("b", leaving=True),
        pod("c", phase="Failed", ready=False, ip=""),
    )
    assert copy.pods["a"] == Pod(
        "a",
        "uid-a",
        "127.0.0.1",
        "node-a",
        True,
        False,
        False,
        {"app": "vllm"},
        {"kvroute.io/slots": "64"},
    )
    assert (copy.pods["b"].ready, copy.pods["b"].leaving) == (False, True)
    assert copy.pods["c"].ended


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_copy_is_the_clusters_after_a_list(seed: int) -> None:
    rng = random.Random(seed)
    copy, cluster, followed = watched(), dict[str, Object](), dict[str, Pod]()

    def take(changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Put(one):
                    followed[one.name] = one
                case Gone(one):
                    del followed[one.name]

    version = 100
    for _ in range(300):
        version += 1
        name = rng.choice("abcdef")
        heard = rng.random() < 0.7
        if name in cluster and rng.random() < 0.4:
            document = cluster.pop(name)
            kind = "DELETED"
        else:
            kind = "MODIFIED" if name in cluster else "ADDED"
            document = cluster[name] = pod(name, ready=rng.random() < 0.5)
        if heard and copy.watching:
            take(copy.on_line(event(kind, document, str(version))))
        if not heard:  # history is lost
            copy.on_line(error(410))
        if rng.random() < 0.2:
            while not isinstance(step := copy.next(0.0), Watch):
                if isinstance(step, List):
                    take(copy.on_page(page(*cluster.values(), version=str(version)), 0.0))
            assert sorted(copy.pods) == sorted(cluster), f"seed {seed}"
        assert followed == copy.pods, f"seed {seed}"


@pytest.mark.parametrize(
    ("ready", "containers", "expected"),
    [
        ({"status": "True"}, "True", True),
        ({"status": "False", "reason": "ContainersNotReady"}, "False", False),
        ({"status": "False", "reason": "ReadinessGatesNotReady"}, "True", False),
        # What the node controller makes of a node that it has not heard of.
        ({"status": "False"}, "True", True),
        ({"status": "False"}, "False", False),
    ],
)
def test_only_the_kubelet_says_that_a_pod_is_not_ready(
    ready: dict[str, str], containers: str, expected: bool
) -> None:
    document = pod("a")
    document["status"]["conditions"] = [
        {"type": "Ready", **ready},
        {"type": "ContainersReady", "status": containers},
    ]
    (change,) = listed().on_line(event("ADDED", document, "101"))
    assert change.pod.ready is expected
