"""Engines by name: which requests a step computes, after each engine's own scheduler.

Adding one is one file, one entry here, one test.
"""

from collections.abc import Callable

from simulator.engines.scheduler import Scheduler, SchedulerConfig
from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.sglang.scheduler import SglangScheduler
from simulator.schedulers.vllm.scheduler import VllmScheduler

SCHEDULERS: dict[str, Callable[[SchedulerConfig], Scheduler]] = {
    "vllm": VllmScheduler,
    "sglang": SglangScheduler,
    "chitu": ChituScheduler,
    "chitu-skew": SkewScheduler,
    "chitu-dp": DpFifoScheduler,
}
