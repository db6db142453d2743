"""Two stand-in engines: python -m tests.hostile.engines

The first line on standard output is the relays' settings, as JSON. The process ends when its input
does. It is no part of the server's, whose turns and memory are measured.
"""

import asyncio
import sys

import uvloop

from simulator.engines.scheduler import SchedulerConfig
from simulator.live.engine import EngineConfig
from simulator.live.run import live_engines
from tests.hostile.target import pin
from tests.stage.channel import lines, say

ENGINES = 2
SCHEDULER = SchedulerConfig(block_count=2048, block_size=64)


async def run() -> int:
    pin(attacker=True)  # as another host would, they take nothing of the server's core
    configs = [EngineConfig(f"engine-{i}", SCHEDULER) for i in range(ENGINES)]
    async with live_engines(configs, speed=1000.0) as engines:
        say(workers=[engine.relay_settings() for engine in engines])
        async for _ in lines():
            pass
    return 0


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(run()))
