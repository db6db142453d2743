"""Engines by name: which requests a step computes, after each engine's own scheduler.

Adding one is one file, one entry here, one test.
"""

from collections.abc import Callable

from simulator.scheduler import Scheduler, SchedulerConfig
from simulator.schedulers.vllm import VllmScheduler

SCHEDULERS: dict[str, Callable[[SchedulerConfig], Scheduler]] = {"vllm": VllmScheduler}
