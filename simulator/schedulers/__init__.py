"""Schedulers by engine: each decides which requests a step computes, as the engine's own does.

A new scheduler is a file, an entry here and a test.
"""

from collections.abc import Callable
from dataclasses import dataclass

from events.engines.engine import Engine
from events.engines.sglang.engine import SGLANG
from events.engines.vllm.engine import VLLM
from simulator.engines import sglang_wire, vllm_wire
from simulator.engines.scheduler import Scheduler, SchedulerConfig
from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig
from simulator.schedulers.sglang.config import SglangConfig
from simulator.schedulers.sglang.scheduler import SglangScheduler
from simulator.schedulers.vllm.config import VllmConfig
from simulator.schedulers.vllm.scheduler import VllmScheduler


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of simulated engine: its scheduler, its options, and its form as a process."""

    scheduler: Callable[[SchedulerConfig], Scheduler]
    config: type[SchedulerConfig]
    engine: Engine = VLLM
    """The engine whose HTTP pages and events a stand-in of this kind has."""
    encode_batch: Callable[..., bytes] = vllm_wire.encode_batch


SCHEDULERS = {
    VLLM.name: Kind(VllmScheduler, VllmConfig),
    SGLANG.name: Kind(SglangScheduler, SglangConfig, SGLANG, sglang_wire.encode_batch),
    "chitu": Kind(ChituScheduler, ChituConfig),
    "chitu-skew": Kind(SkewScheduler, ChituConfig),
    "chitu-dp": Kind(DpFifoScheduler, ChituConfig),
}
