"""What a trace's requests carry reaches the router and the engines."""

from dataclasses import replace

import numpy as np
import pytest

from router.decide.core.core import RouterCore
from router.request.request import Request
from simulator.engines.profile import load_profile
from simulator.schedulers.options import scheduler_config
from simulator.traffic.results import Outcome
from simulator.traffic.trace import TraceRequest
from simulator.traffic.trace_file import read_trace
from simulator.world.options import EventForm, RunOptions
from simulator.world.world import run
from tests.simulator.worlds import trace


def carrying(**carried: object) -> TraceRequest:
    return replace(TraceRequest(0.0, 1100, 4, np.array([1, 2, 3], np.uint64)), **carried)


def options(engine: str = "vllm", events: EventForm = "facts", **engine_options: str) -> RunOptions:
    scheduler = scheduler_config(
        engine,
        load_profile("llama-8b-h100"),
        block_size=64,
        block_count=400,
        joined_steps_max=100,
        options=engine_options,
    )
    return RunOptions(engine=engine, scheduler=scheduler, workers=1, events=events, check=True)


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that routers get."""
    requests: list[Request] = []
    route = RouterCore.route

    def noting(core: RouterCore, request: Request, *args: object, **others: object) -> object:
        requests.append(request)
        return route(core, request, *args, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(RouterCore, "route", noting)
    return requests


@pytest.mark.parametrize("events", ["facts", "engine"])
def test_a_router_gets_model_lora_tenant_and_session(
    events: EventForm, routed: list[Request]
) -> None:
    plain = carrying()
    named = carrying(
        arrival_s=1.0, model="chat", lora_name="poems", tenant="red", session_id="s", priority=3
    )
    result = run(options(events=events), trace(plain, named))
    assert result.outcome.tolist() == [Outcome.SERVED] * 2
    told = [(one.model, one.prompt.lora_name, one.tenant, one.session_id) for one in routed]
    assert told == [("", "", "", ""), ("chat", "poems", "red", "s")]


def test_prompts_of_different_models_and_loras_find_nothing_of_one_another() -> None:
    names = ["", ',"model":"a"', ',"lora":"a"', ',"model":"a","lora":"a"']
    lines = [
        f'{{"timestamp":{1000 * i},"input_length":1100,"output_length":4,"hash_ids":[1,2,3]{name}}}'
        for i, name in enumerate(names + names)
    ]
    result = run(options(max_loras="2"), trace(*read_trace(lines)))
    assert result.outcome.tolist() == [Outcome.SERVED] * 8
    assert (result.cached_tokens > 0).tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("engine", "engine_options"),
    [
        ("vllm", {"policy": "priority", "max_num_seqs": "1"}),
        ("sglang", {"priority_scheduling": "true", "max_num_seqs": "1"}),
        (
            "sglang",
            {"priority_scheduling": "true", "low_priority_values_first": "1", "max_num_seqs": "1"},
        ),
        ("chitu", {"step_tokens_max": "1100"}),
    ],
)
def test_the_higher_priority_of_a_trace_is_sooner_on_every_engine_that_schedules_by_it(
    engine: str, engine_options: dict[str, str]
) -> None:
    texts = [np.array([10 * i, 10 * i + 1, 10 * i + 2], np.uint64) for i in range(4)]
    priorities = [None, 1, 5, 9]
    requests = [
        carrying(arrival_s=0.001 * i, hash_ids=text, priority=priority)
        for i, (text, priority) in enumerate(zip(texts, priorities, strict=True))
    ]
    # Of unknown capacity, so that all of them wait at the engine, not at their clients.
    fleet = replace(options(engine, **engine_options), tells_capacity=False)
    result = run(fleet, trace(*requests))
    assert result.outcome.tolist() == [Outcome.SERVED] * 4
    first_tokens = result.arrival_s + result.ttft_s
    assert first_tokens[3] < first_tokens[2] < first_tokens[1]
