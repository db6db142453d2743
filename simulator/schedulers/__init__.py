"""Engines by name: which requests a step computes, after each engine's own scheduler.

Adding one is one file, one entry here, one test.
"""

from collections.abc import Callable

from simulator.scheduler import Scheduler, SchedulerConfig
from simulator.schedulers.chitu import ChituScheduler
from simulator.schedulers.chitu_dp import DpFifoScheduler
from simulator.schedulers.chitu_skew import SkewScheduler
from simulator.schedulers.sglang import SglangScheduler
from simulator.schedulers.vllm import VllmScheduler

SCHEDULERS: dict[str, Callable[[SchedulerConfig], Scheduler]] = {
    "vllm": VllmScheduler,
    "sglang": SglangScheduler,
    "chitu": ChituScheduler,
    "chitu-skew": SkewScheduler,
    "chitu-dp": DpFifoScheduler,
}
