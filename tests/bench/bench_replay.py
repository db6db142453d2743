"""What a replay in virtual time costs: the conversation trace on eight engines, 64-token blocks.

The whole trace doesn't ship: KVROUTE_TRACES is the folder of those that were downloaded
(simulator/traffic/data/README.md names them). Without it the slice that ships is played instead.
"""

import os
from pathlib import Path
from typing import Any

from simulator.traffic.trace_file import load_trace
from simulator.world.options import RunOptions
from simulator.world.world import run
from tests.bench.timing import row

NAMES = ("conversation_trace.jsonl", "mooncake_conversation_trace.jsonl")


def rows() -> list[dict[str, Any]]:
    """Seconds of one run, and microseconds a prompt block."""
    folder = Path(os.environ.get("KVROUTE_TRACES", "."))
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    trace = load_trace(path or "conversation").spread()
    result = run(RunOptions(), trace if path else trace.at_rate(10.0))
    blocks = int(result.prompt_blocks.sum())
    note = f"{result.request_count} requests, {blocks} prompt blocks"
    return [
        row(
            "replay_conversation_s" if path else "replay_slice_s",
            round(result.wall_s, 2),
            "s",
            "less",
            note,
        ),
        row("replay_block_us", round(result.wall_s / blocks * 1e6, 2), "us", "less"),
    ]
