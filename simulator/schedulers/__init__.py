"""Schedulers by engine: each decides which requests a step computes, as the engine's own does.

A new scheduler is a file, an entry here and a test.
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
