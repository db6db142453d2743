"""Which router runs a relay for which pod, and when: without sockets, on a clock of its own."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cluster.discovery.followed import (
    ASK_MAX_S,
    IDENTIFYING_MAX,
    TAKEOVER_S,
    Effect,
    FollowedPods,
    Forget,
    Identify,
    Leave,
    Start,
)
from router.cluster.discovery.pods import NUMBERS, PORTS, ROLE_LABEL, SWITCHES, TEXTS, Plan
from router.cluster.discovery.watched import ANNOTATION, Change, Gone, Pod, Put

PLAN = Plan((8000,), 5557, 5558, "host")


def pod(name: str = "vllm-0", *, ready: bool = True, uid: str = "1", **changes: object) -> Pod:
    ip = f"10.0.0.{1 + sum(map(ord, name)) % 250}"
    return Pod(name, uid, ip, "node-a", ready, False, False, {}, {})._replace(**changes)  # type: ignore[arg-type]


@dataclass
class Router:
    """Workers as one router knows them, and the pods that it follows."""

    name: str = "a"
    replicas: Collection[str] = ()
    beats: set[str] = field(default_factory=set)
    """Workers that another relay beats for."""
    relays: set[str] = field(default_factory=set)
    operators: set[str] = field(default_factory=set)
    """Workers that an operator removed."""
    no_room: str = ""
    """Why no relay starts; empty: they do."""

    def __post_init__(self) -> None:
        self.followed = FollowedPods(PLAN, self.name)

    def look(self) -> None: ...

    def running(self, worker_id: str) -> bool:
        return worker_id in self.relays

    def elsewhere(self, worker_id: str, address: str) -> bool:
        return worker_id in self.beats or address in self.beats

    def others(self) -> Collection[str]:
        return self.replicas

    def removed(self, worker_id: str) -> bool:
        return worker_id in self.operators

    def changed(self, *changes: Change) -> list[Effect]:
        return self.followed.on_changes(changes)

    def step(self, now_s: float, answer: bool = True) -> list[Effect]:
        """Steps until nothing is left to do; engines answer at once, with their kind."""
        done: list[Effect] = []
        while effects := self.followed.step(self, now_s):
            done += effects
            for effect in effects:
                match effect:
                    case Identify(endpoint, one):
                        kind, why = ("vllm", "") if answer else (None, "refused")
                        self.followed.on_identified(endpoint, one, kind, {}, why, now_s)  # type: ignore[arg-type]
                    case Start(settings):
                        if not self.no_room:
                            self.relays.add(settings.id)
                        self.followed.on_started(settings.id, self.no_room, now_s, failed=True)
                    case Leave(worker_id, _):
                        self.relays.discard(worker_id)
        return done


def starts(effects: Iterable[Effect]) -> list[str]:
    return [effect.settings.id for effect in effects if isinstance(effect, Start)]


def test_a_ready_pod_gets_a_relay_once() -> None:
    router = Router()
    router.changed(Put(pod()))
    assert starts(router.step(0.0)) == ["vllm-0"]
    assert router.step(1.0) == []


JUNK = (
    st.text(max_size=8)
    | st.integers(-1, 70_000).map(str)
    | st.just("9" * 5000)
    | st.sampled_from(["true", "vllm", "prefill", "none", "\u0663", "tcp://x", "\ud800"])
)
KEYS = [*PORTS, *NUMBERS, *SWITCHES, *TEXTS, "address", "", "odd/key"]
ANNOTATIONS = st.dictionaries(
    st.sampled_from([f"{ANNOTATION}{key.replace('_', '-')}" for key in KEYS]), JUNK, max_size=4
)
LABELS = st.dictionaries(st.just(ROLE_LABEL), JUNK)


@given(st.lists(st.tuples(ANNOTATIONS, LABELS, st.booleans()), min_size=1, max_size=5))
def test_odd_pods_cost_no_other_pod_its_relay_and_have_a_trouble_with_their_name(
    odd: list[tuple[dict[str, str], dict[str, str], bool]],
) -> None:
    router = Router()
    pods = [
        pod(f"odd-{number}", ready=ready, annotations=annotations, labels=labels)
        for number, (annotations, labels, ready) in enumerate(odd)
    ]
    router.changed(*map(Put, (*pods, pod("well"))))
    started = starts(router.step(0.0))
    assert "well" in started
    troubles = router.followed.troubles()
    assert router.followed.ready() == [name for name in started if name not in troubles]
    for one in pods:
        assert one.name not in started or one.name not in troubles
        if one.ready:
            assert one.name in started or troubles[one.name]
    router.changed(*(Put(one._replace(annotations={}, labels={}, ready=True)) for one in pods))
    router.step(ASK_MAX_S)
    assert router.relays == {"well", *(one.name for one in pods)}
    assert router.followed.troubles() == {}
    router.changed(*map(Gone, pods))
    assert len(router.followed) == 1


def test_a_pod_that_was_never_ready_gets_none_and_no_requests() -> None:
    router = Router()
    router.changed(Put(pod(ready=False)))
    assert router.step(0.0) == []
    assert router.followed.held() == {"vllm-0"}
    router.changed(Put(pod()))
    assert starts(router.step(1.0)) == ["vllm-0"]
    assert router.followed.held() == frozenset()


def test_a_pod_that_is_not_ready_for_a_while_keeps_its_relay_and_gets_no_requests() -> None:
    router = Router()
    router.changed(Put(pod()))
    router.step(0.0)
    assert router.changed(Put(pod(ready=False))) == []
    assert router.step(1.0) == []
    assert router.followed.held() == {"vllm-0"}
    assert router.relays == {"vllm-0"}


def test_a_pod_that_is_gone_is_forgotten() -> None:
    router = Router()
    router.changed(Put(pod()))
    router.step(0.0)
    assert router.changed(Gone(pod())) == [Forget("vllm-0")]
    assert len(router.followed) == 0


def test_a_pod_that_ended_is_gone_too() -> None:
    router = Router()
    router.changed(Put(pod()))
    assert router.changed(Put(pod(ended=True))) == [Forget("vllm-0")]
    assert router.changed(Put(pod("x", ended=True))) == []


def test_a_new_pod_of_the_same_name_is_another_worker() -> None:
    router = Router()
    router.changed(Put(pod()))
    router.step(0.0)
    assert router.changed(Put(pod(uid="2", ip="10.9.9.9"))) == [Forget("vllm-0")]
    router.relays.clear()
    (start,) = [one for one in router.step(1.0) if isinstance(one, Start)]
    assert start.settings.address == "http://10.9.9.9:8000"


def test_other_ports_make_other_workers_of_pods_that_stay_as_they_are() -> None:
    router = Router()
    of_its_own = pod("own", annotations={"kvroute.io/port": "9000"})
    router.changed(Put(pod()), Put(pod("waits", ready=False)), Put(of_its_own))
    router.step(0.0)
    plan = PLAN._replace(ports=(8080,))
    assert router.followed.replan(plan) == [Forget("vllm-0"), Forget("waits")]
    router.relays.discard("vllm-0")
    (start,) = [one for one in router.step(1.0) if isinstance(one, Start)]
    assert start.settings.address == f"http://{pod().ip}:8080"
    assert router.followed.replan(plan) == []
    assert router.followed.held() == {"waits"}


def test_a_worker_with_a_relay_beside_it_gets_none_here() -> None:
    router = Router(beats={"vllm-0"})
    router.changed(Put(pod()))
    assert router.step(0.0) == []
    by_address = Router(beats={f"http://{pod().ip}:8000"})
    by_address.changed(Put(pod()))
    assert by_address.step(0.0) == []


def test_of_two_relays_the_one_with_the_lower_epoch_leaves() -> None:
    router = Router()
    router.changed(Put(pod()))
    router.step(0.0)
    router.beats.add("vllm-0")
    assert router.step(1.0) == [Leave("vllm-0", "other_relay")]
    assert router.followed.counts["left"] == 1


def test_each_pod_is_followed_by_one_of_the_routers() -> None:
    names = ("a", "b", "c")
    routers = [Router(name, [other for other in names if other != name]) for name in names]
    pods = [pod(f"vllm-{i}") for i in range(60)]
    for router in routers:
        router.changed(*map(Put, pods))
        router.step(0.0)
    followed = [sorted(router.relays) for router in routers]
    assert sorted(name for one in followed for name in one) == sorted(one.name for one in pods)
    assert all(8 <= len(one) <= 32 for one in followed)


def test_the_next_router_takes_over_when_nobody_beats() -> None:
    router = Router("a", ["b", "c"])
    pods = [pod(f"vllm-{i}") for i in range(30)]
    router.changed(*map(Put, pods))
    router.step(0.0)
    first = len(router.relays)
    router.step(TAKEOVER_S)
    second = len(router.relays)
    router.step(2 * TAKEOVER_S)
    assert 0 < first < second < len(router.relays) == len(pods)


def test_beats_keep_the_others_from_taking_over() -> None:
    router = Router("a", ["b"])
    (mine,) = [name for name in ("vllm-0", "vllm-1", "vllm-2") if _is_of("b", "a", name)][:1]
    router.changed(Put(pod(mine)))
    router.beats.add(mine)
    assert router.step(100.0) == []
    router.beats.clear()
    assert router.step(101.0) == []
    assert starts(router.step(101.0 + TAKEOVER_S)) == [mine]


def _is_of(first: str, second: str, name: str) -> bool:
    """Whether the first router comes before the second for a pod."""
    router = Router(second, [first])
    router.changed(Put(pod(name)))
    return not starts(router.step(0.0))


def test_an_operators_removal_holds() -> None:
    router = Router(operators={"vllm-0"})
    router.changed(Put(pod()))
    assert router.step(0.0) == []
    router.operators.clear()
    assert starts(router.step(60.0)) == ["vllm-0"]


def test_a_pod_on_its_way_out_gets_no_relay() -> None:
    router = Router()
    router.changed(Put(pod()), Put(pod(ready=False, leaving=True)))
    assert router.step(0.0) == []


def test_an_engine_that_does_not_answer_is_asked_again_ever_more_seldom() -> None:
    router = Router()
    router.changed(Put(pod()))
    asked = [now_s / 10 for now_s in range(1000) if router.step(now_s / 10, answer=False)]
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert max(pauses) <= ASK_MAX_S + 0.11
    assert "refused" in router.followed.troubles()["vllm-0"]
    assert starts(router.step(1000.0)) == ["vllm-0"]
    assert router.followed.troubles() == {}


def test_annotations_that_can_not_be_used_are_told_until_they_are_mended() -> None:
    router = Router()
    router.changed(Put(pod(annotations={"kvroute.io/slots": "x"})))
    assert starts(router.step(0.0)) == []
    assert "kvroute.io/slots" in router.followed.troubles()["vllm-0"]
    router.changed(Put(pod(annotations={"kvroute.io/slots": "8"})))
    (start,) = [one for one in router.step(0.1) if isinstance(one, Start)]
    assert start.settings.slots == 8


def test_a_pod_whose_worker_would_have_the_name_of_another_is_told_and_costs_that_one_nothing() -> (
    None
):
    router = Router()
    router.followed.replan(PLAN._replace(ports=(8000, 8001)))
    single = pod("vllm-0-8000", annotations={"kvroute.io/port": "8000"})
    router.changed(Put(pod()), Put(single))
    assert "vllm-0-8000" in router.followed.troubles()["vllm-0-8000"]
    assert router.changed(Gone(single)) == []
    assert starts(router.step(0.0)) == ["vllm-0-8000", "vllm-0-8001"]
    router.changed(Put(single))
    assert router.changed(Gone(pod())) == [Forget("vllm-0-8000"), Forget("vllm-0-8001")]
    router.relays.clear()
    assert starts(router.step(20.0)) == ["vllm-0-8000"], "the name is free"


def test_a_port_that_is_listed_twice_is_told() -> None:
    router = Router()
    router.followed.replan(PLAN._replace(ports=(8000, 8000)))
    router.changed(Put(pod()))
    assert "vllm-0-8000" in router.followed.troubles()["vllm-0"]
    router.followed.replan(PLAN)
    assert router.followed.troubles() == {}
    assert starts(router.step(0.0)) == ["vllm-0"]
    assert router.followed.replan(PLAN._replace(ports=(8000, 8000))) == [Forget("vllm-0")]
    assert router.changed(Gone(pod())) == []


def test_only_so_many_engines_are_asked_at_once() -> None:
    router = Router()
    router.changed(*(Put(pod(f"vllm-{i}")) for i in range(IDENTIFYING_MAX + 10)))
    assert len(router.followed.step(router, 0.0)) == IDENTIFYING_MAX
    assert router.followed.step(router, 0.1) == []


def test_an_answer_for_a_pod_that_is_gone_is_ignored() -> None:
    router = Router()
    router.changed(Put(pod()))
    (asked,) = router.followed.step(router, 0.0)
    assert isinstance(asked, Identify)
    router.changed(Put(pod(uid="2", ip="10.9.9.9")))
    router.followed.on_identified(asked.endpoint, asked.pod, "sglang", {}, "", 0.1)
    (start,) = [one for one in router.step(0.2) if isinstance(one, Start)]
    assert start.settings.engine == "vllm"


def test_a_relay_without_room_is_tried_again_ever_more_seldom_and_told() -> None:
    router = Router(no_room="256 relays run in this router")
    router.changed(Put(pod()))
    tries = [step / 4 for step in range(400) if starts(router.step(step / 4))]
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, *[ASK_MAX_S] * 8]
    assert router.followed.troubles() == {"vllm-0": "256 relays run in this router"}
    assert router.followed.counts["started"] == 0
    router.no_room = ""
    assert starts(router.step(200.0)) == ["vllm-0"]
    assert router.followed.counts["started"] == 1
    assert router.followed.troubles() == {}


@pytest.mark.parametrize("by", ["another relay", "an operator"])
def test_a_worker_that_needs_no_relay_here_has_no_trouble(by: str) -> None:
    router = Router(no_room="256 relays run in this router")
    router.changed(Put(pod()))
    router.step(0.0)
    (router.beats if by == "another relay" else router.operators).add("vllm-0")
    assert router.step(0.25) == []
    assert router.followed.troubles() == {}
