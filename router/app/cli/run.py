"""Runs a command's coroutine on an event loop."""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Coroutine
from typing import Any

import click
import uvloop

COLLECTED_AFTER = (1_000, 3, 25_000)
"""Thresholds of gc.set_threshold: new objects beyond the freed ones before a first collection of
these, and collections of one generation before one of the next. The first two bound a pause: it
goes over 4,000 objects, about 1 ms. The third keeps collections of all objects, which take longer,
100 million objects apart. Measured in docs/decisions.md."""

THREAD_TURN_S = 0.0005
"""Seconds for which a thread runs Python before another one may (sys.setswitchinterval). The event
loop waits so long whenever it comes back from the system while another thread works: writing the
metrics of 1,000 workers takes tenths of a second, and with Python's 5 ms every request met on its
way several such waits."""

MALLOC = {
    "M_ARENA_MAX": (-8, 2),
    "M_MMAP_THRESHOLD": (-3, 4 << 20),
    "M_TRIM_THRESHOLD": (-1, 4 << 20),
}
"""Options of glibc's mallopt(3): (number in malloc.h, value). What has 4 MiB or more is given back
to the system when it is freed, and so is the end of the heap beyond 4 MiB. By default both bounds
grow to tens of MiB with the largest message ever freed, and gRPC's threads have arenas of their own
that keep what they free: resident memory then grows for as long as a router has traffic.

Lower bounds give each read or batch of prompts new pages from the system. 128 KiB gives back
uvloop's buffers of connections with TLS, too (256 KiB each), which showed no more: 147 MiB after
2,000 of them, 146 without; but 8,192 tokens in a unary call took 119 us of CPU instead of 83. With
1 MiB, the size of a stream's batch of 32 such prompts, it took 640 us instead of 165 to put one
together and copy it once."""


def settle() -> None:
    """Sets up this process: the garbage collector looks for cycles rarely, threads take short
    turns, and malloc gives free memory back to the system.
    """
    sys.setswitchinterval(THREAD_TURN_S)
    # Nearly all that we make is freed by its count of references. Looking for cycles among what was
    # imported, and among hundreds of thousands of reservations, stops the loop for nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for option, value in MALLOC.values():
            mallopt(option, value)


def run(work: Coroutine[Any, Any, int | None]) -> None:
    """Runs a coroutine to its end, and exits the process with its result, if any, as exit code."""
    settle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(work)
    if code:
        raise click.exceptions.Exit(code)
