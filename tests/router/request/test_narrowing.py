"""Each field of Narrowing: read, respected by decisions and by the queue; the client's fallback
excludes the same workers. Copies: tests/router/decide/copies/test_hot_prefixes.py."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvroute.client import FallbackPolicy, route_request
from kvroute.client.fallback.fallback import Fallback
from kvroute.v1 import Phase, Progress, ProgressState
from router.api.desk.answers import Waiting
from router.api.desk.counters import Metrics
from router.api.desk.request_codec import read_request, receive
from router.api.desk.worker_codec import write_worker
from router.config.settings.queue_settings import QueueSettings
from router.fleet.eligibility import exclusion
from router.request.refusal import Refusal
from router.request.request import Request
from tests.stage.fleet import Fleet, prompt
from tests.stage.narrowings import CASES, FIELDS
from tests.stage.served import asked, desk_of, raised


def fleet_of(field: str, **about: Any) -> Fleet:
    fleet, case = Fleet(), CASES[field]
    fleet.add("a", **about | case.fit)
    fleet.add("b", **about | case.unfit)
    return fleet


def read(content: bytes, fleet: Fleet) -> Request:
    return read_request(receive(content, 1 << 20), fleet.core, fleet.now_s)


@pytest.mark.parametrize("field", FIELDS)
def test_what_a_request_names_narrows_its_workers_and_no_other_request_s(field: str) -> None:
    fleet, case = fleet_of(field), CASES[field]
    request = read(asked(16, **case.options).SerializeToString(), fleet)
    assert request.narrowing == case.narrowing
    plain = fleet.request(prompt(16))
    assert plain.narrowing is None
    for narrowed in (True, False, True):
        decision = fleet.core.decide(request if narrowed else plain, fleet.now_s)
        able = {decision.sources[row].key.worker_id for row in decision.order}
        assert able == ({"a"} if narrowed else {"a", "b"})


@pytest.mark.parametrize("field", FIELDS)
def test_a_request_that_waits_for_few_workers_holds_no_other(field: str) -> None:
    fleet, case = fleet_of(field, total_slots=1), CASES[field]
    metrics = Metrics(CollectorRegistry())
    desk = desk_of(fleet, metrics, raised, queue=QueueSettings())
    desk.admission.queue.look_past = 0
    desk.admission.queue.configure(QueueSettings(), 0.0)
    running = {}
    for _ in "ab":
        answered = desk.route(asked(16).SerializeToString())
        assert not isinstance(answered, Waiting)
        running[answered[1].worker.worker_id] = answered[1]
    narrowed = desk.route(asked(16, **case.options).SerializeToString())
    plain = desk.route(asked(16).SerializeToString())
    assert isinstance(narrowed, Waiting)
    assert isinstance(plain, Waiting)
    desk.cancel(running["b"])
    desk.changed()
    desk.dispatch()
    assert narrowed.outcome is None
    assert plain.outcome is not None


OPTIONS: dict[str, list[Any]] = {
    "model": ["m", "alias", "ad"],
    "phase": [Phase.PHASE_AGGREGATED, Phase.PHASE_PREFILL, Phase.PHASE_DECODE],
    "lora_name": ["ad", "other"],
    "required_labels": [{"zone": "1"}, {"zone": ""}, {"zone": "1", "disk": "2"}],
    "excluded_labels": [{"zone": "1"}, {"zone": "2", "disk": "2"}],
    "allowed_worker_ids": [["a"], ["a", "b"], ["x"]],
    "excluded_worker_ids": [["a"], ["b", "x"]],
}
SAID: dict[str, list[Any]] = {
    "model_aliases": [(), ("alias",)],
    "role": ["both", "both", "prefill", "decode"],
    "lora_names": [(), ("ad",), ("ad", "other")],
    "labels": [{}, {"zone": "1"}, {"zone": "1", "disk": "2"}, {"zone": ""}],
}
"""Without `loads_loras`: WorkerStatus doesn't have it, so the fallback knows no worker by it."""


def test_the_client_s_fallback_excludes_the_same_workers() -> None:
    rng, narrowed = Random(35), set()
    for _ in range(200):
        fleet, fallback = Fleet(), Fallback(FallbackPolicy(), Counter(), Random(1))
        for name in "abc":  # as many as an answer names
            fleet.add(name, **{said: rng.choice(values) for said, values in SAID.items()})
        core = fleet.core
        sources = fleet.view.sources.values()
        fallback.listed([write_worker(source, core, fleet.now_s) for source in sources], 0.0)
        for _ in range(10):
            chosen = rng.sample([*OPTIONS], rng.randrange(4))
            options: Any = {name: rng.choice(OPTIONS[name]) for name in chosen}
            message = route_request(token_ids=[1, 2, 3], **options)
            request = read(message.SerializeToString(), fleet)
            try:
                pool, _ = core.fleet.pools.live(request.model, ready=True)
            except Refusal:
                continue
            ours = {
                source.key.worker_id
                for source in pool.sources
                if not exclusion(request, 0, source, ())
            }
            answer = fallback.pick(message, 1.0)
            theirs = set()
            if answer is not None:
                theirs = {answer.worker_id, *(each.worker_id for each in answer.alternatives)}
                ended = ProgressState.PROGRESS_STATE_FINISHED
                step = Progress(reservation_id=answer.reservation_id, state=ended)
                fallback.reported(step, 1.0)
            assert theirs == ours, (options, pool.sources)
            if request.narrowing is not None and 0 < len(ours) < len(pool):
                named = zip(FIELDS, request.narrowing, strict=True)
                narrowed |= {field for field, value in named if value}
    assert narrowed == set(FIELDS)
