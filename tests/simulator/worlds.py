"""Random traces and fleets of the virtual world, and what must hold of each run."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from simulator.engines.scheduler import SchedulerConfig
from simulator.schedulers.vllm.config import VllmConfig
from simulator.traffic.results import Outcome, RunResult
from simulator.traffic.trace import ID_TOKENS, Trace, TraceRequest
from simulator.world.options import Disaggregation, Failure, RelayRestart, RouterRestart, RunOptions
from simulator.world.world import World

SMALL = SchedulerConfig(block_count=96, block_size=64, joined_steps_max=10_000, max_num_seqs=8)


FOUR_SLOTS = VllmConfig(block_count=2048, block_size=64, max_num_seqs=4, joined_steps_max=10_000)


def request(arrival_s: float, ids: list[int], output_tokens: int = 8, **about: Any) -> TraceRequest:
    """A prompt of whole ids, of 512 tokens each unless it says otherwise."""
    tokens = about.pop("prompt_tokens", about.get("id_tokens", ID_TOKENS) * len(ids))
    return TraceRequest(arrival_s, tokens, output_tokens, np.array(ids, np.uint64), **about)


def crowd(count: int, every_s: float = 0.05, **about: Any) -> Trace:
    """Prompts of 1,024 tokens that share nothing, and answers of 100 tokens."""
    return trace(
        *(request(2.0 + every_s * i, [2 * i, 2 * i + 1], 100, **about) for i in range(count))
    )


def trace(*requests: TraceRequest) -> Trace:
    return Trace("by hand", requests)


def checked(of: Trace, **options: Any) -> tuple[World, RunResult]:
    options.setdefault("scheduler", SMALL)
    options.setdefault("workers", 2)
    world = World(RunOptions(check=True, **options), of)
    return world, world.run()


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A few requests that share beginnings, some of them turns of sessions."""
    requests: list[TraceRequest] = []
    arrival_s = 0.0
    sessions: dict[str, list[int]] = {}
    for number in range(draw(st.integers(1, 25))):
        arrival_s += draw(st.sampled_from([0.0, 0.0, 0.01, 0.01, 0.1, 0.3, 0.3, 2.0, 2.0, 400.0]))
        session = draw(st.sampled_from([None, "a", "b"]))
        shared = list(range(draw(st.integers(0, 3))))
        ids, think_s = [*shared, 100 + number], None
        if session is not None:
            if session in sessions:
                think_s = draw(st.sampled_from([0.0, 0.5, 3.0, None]))
                ids = [*sessions[session], 100 + number][:9]
            sessions[session] = ids
        cut = draw(st.integers(0, 200))
        made = request(
            arrival_s, ids, draw(st.integers(1, 300)), session_id=session, think_s=think_s
        )
        requests.append(replace(made, prompt_tokens=made.prompt_tokens - cut))
    return trace(*requests)


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    """What may go wrong, and how much of it."""
    workers = draw(st.integers(1, 4))
    worker = st.integers(0, workers - 1)
    at_s, down_s = st.floats(0.0, 10.0), st.sampled_from([0.2, 4.0, 40.0])
    delay_s = draw(st.sampled_from([0.0, 0.005, 0.5]))
    return {
        "workers": workers,
        "policy": draw(
            st.sampled_from(["dynamo-adaptive", "round-robin", "simulator.world.yardsticks:random"])
        ),
        "seed": draw(st.integers(0, 1000)),
        "replicas": draw(st.integers(1, 3)),
        "inflight": draw(st.booleans()),
        "engine": draw(st.sampled_from(["vllm", "vllm", "sglang", "chitu"])),
        "spread": draw(st.sampled_from(["round_robin", "random"])),
        "events": draw(st.sampled_from(["facts", "facts", "none"])),
        "event_delay_s": delay_s,
        "event_jitter_s": draw(st.floats(0.0, 1.0)) * delay_s,
        "event_loss": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "approximate_workers": draw(st.integers(0, workers)),
        "past_router_share": draw(st.sampled_from([0.0, 0.3])),
        "disaggregation": None
        if workers == 1 or draw(st.booleans())
        else Disaggregation(
            draw(st.integers(1, workers - 1)), draw(st.sampled_from(["pair", "pair", "each"]))
        ),
        "failures": tuple(
            draw(st.lists(st.builds(Failure, at_s=at_s, worker=worker, down_s=down_s), max_size=3))
        ),
        "router_restarts": tuple(
            draw(st.lists(st.builds(RouterRestart, at_s=at_s, router=st.just(0)), max_size=2))
        ),
        "relay_restarts": tuple(
            draw(
                st.lists(
                    st.builds(
                        RelayRestart,
                        at_s=at_s,
                        worker=worker,
                        down_s=down_s,
                        keeps_map=st.booleans(),
                    ),
                    max_size=2,
                )
            )
        ),
    }


def check(of: Trace, options: dict[str, Any]) -> None:
    """Plays one run; raises AssertionError, or LawBroken, for anything that must not be."""
    world, result = checked(of, **options)
    assert len(of.requests) == world.record.ended
    counts = np.bincount(result.outcome, minlength=len(Outcome))
    assert counts[Outcome.FAILED] == sum(result.failures.values())
    served = result.outcome == Outcome.SERVED
    assert (result.cached_tokens[served] < result.prompt_tokens[served]).all()
    assert (result.ttft_s[served] >= result.queue_s[served]).all()
    assert (result.e2e_s[served] >= result.ttft_s[served]).all()
