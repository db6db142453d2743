"""The traces and the fleet that all sections share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from router.config.settings.routing_settings import RoutingSettings
from simulator.engines.profile import load_profile
from simulator.schedulers.options import scheduler_config
from simulator.study.comparison import Traffic
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world.options import RunOptions

FILES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "agentic": "claude_code_agentic_dev.jsonl",
}
WORKERS = 8
BLOCK_SIZE = 64
BLOCK_COUNT = 16_384
PROFILE = "mocker"
RATES = (1.0, 3.0, 6.0)
JOINED_STEPS = 10_000
SEED = 0


@dataclass(frozen=True, slots=True)
class Traces:
    """The three traces, whole or as the slices that ship."""

    by_name: dict[str, Traffic]
    whole: bool

    @classmethod
    def of(cls, folder: Path | None) -> "Traces":
        """From a folder with FILES, or the slices."""
        if folder is None:
            loaded = {name: load_trace(name) for name in FILES}
        else:
            loaded = {name: load_trace(folder / file) for name, file in FILES.items()}
        named = {name: replace(trace, name=name) for name, trace in loaded.items()}
        return cls(
            {name: Traffic(trace=trace) for name, trace in named.items()}, folder is not None
        )

    def __getitem__(self, name: str) -> Traffic:
        return self.by_name[name]


def fleet(
    policy: str,
    *,
    blocks: int = BLOCK_COUNT,
    parameters: dict[str, dict[str, float]] | None = None,
    engine_options: dict[str, str] | None = None,
    **about: Any,
) -> RunOptions:
    """Eight engines of the profile that Dynamo's simulator was measured with."""
    scheduler = scheduler_config(
        "vllm",
        load_profile(PROFILE),
        block_size=BLOCK_SIZE,
        block_count=blocks,
        joined_steps_max=JOINED_STEPS,
        options=engine_options,
    )
    return RunOptions(
        policy=policy,
        seed=SEED,
        workers=about.pop("workers", WORKERS),
        scheduler=scheduler,
        routing=RoutingSettings(parameters=parameters or {}),
        **about,
    )


def nothing_shared(trace: Trace, name: str) -> Trace:
    """The same requests at the same times, no two of which have a block in common."""
    requests = []
    first = 1 << 40
    for request in trace.requests:
        ids = np.arange(first, first + len(request.hash_ids), dtype=np.uint64)
        first += len(ids)
        requests.append(replace(request, hash_ids=ids))
    return replace(trace, name=name, requests=tuple(requests))
