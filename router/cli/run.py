"""Runs what a command does on an event loop."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import click
import uvloop

COLLECTED_AFTER = (1_000, 3, 25_000)
"""Objects more than were freed, and rounds, between two looks for cycles (gc.set_threshold). The
first two bound the pause: a look goes over 4,000 objects, about 1 ms. The third keeps the looks at
all objects, which take longer, 100 million objects apart."""


def run(work: Coroutine[Any, Any, int]) -> None:
    """Runs an asyncio program to its end and leaves with its code."""
    # Nearly all that we make is freed by its count of references. Looking for cycles among what was
    # imported, and among hundreds of thousands of reservations, stops the loop for nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(work)
    if code:
        raise click.exceptions.Exit(code)
