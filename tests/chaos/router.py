"""`kvroute serve` with another clock, and with its insides on demand: python -m tests.chaos.router

SIGUSR1 writes what the router believes about every worker to a file, as JSON; before that it frees
Python's unreachable cycles, and gives the memory that malloc keeps free back to the system, so that
what is counted and what is resident is in use. The
router's clock is the host's, put forward, as after a wrong time server.
"""

import argparse
import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from tests.stage.processes import resident_bytes

if TYPE_CHECKING:  # imported by the process once its clock is set
    from router.app.processes.router_process import RouterApp


def put_forward(seconds: float) -> None:
    """The router's clock shows a later time. gRPC's native part reads the host's clock by itself,
    so grpcio must, too: with two clocks in one library every deadline would seem to have passed."""
    from events.plane import clock

    clock._STARTED_S += seconds


def trim_memory() -> None:
    """Gives free memory back to the system, where the C library can: glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Malloc(ctypes.Structure):
    """What glibc's mallinfo2 returns, over all arenas, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


KINDS = 200
"""Kinds of objects that are counted, the most frequent ones."""


def memory() -> dict[str, object]:
    """Fields of records.Memory."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    malloc = 0
    if mallinfo is not None:
        mallinfo.restype = _Malloc
        told = mallinfo()
        malloc = told.uordblks + told.hblkhd
    return {
        "resident": resident_bytes(),
        "malloc": malloc,
        "objects": sys.getallocatedblocks(),
        "kinds": dict(
            Counter(type(one).__qualname__ for one in gc.get_objects()).most_common(KINDS)
        ),
    }


async def leak(mib_a_minute: float) -> None:
    """Holds more and more memory for nothing: a run's laws must say so."""
    held = []
    while True:
        await asyncio.sleep(1.0)
        held.append(os.urandom(round(mib_a_minute * 2**20 / 60)))


async def run(config_file: Path, seen_file: Path, leak_mib_a_minute: float) -> int:
    from router.app.processes.logs import set_up
    from router.app.processes.router_process import RouterApp
    from router.config.reading import load
    from router.config.settings.configurations import ServeConfig
    from tests.chaos.trace import trace

    read = partial(load, ServeConfig, config_file, {}, {})
    config = read()
    set_up(config.log)
    app = RouterApp(config, read_again=read)
    trace(app.core, seen_file.with_suffix(".verdicts"))

    def tell() -> None:
        gc.collect()
        trim_memory()
        part = seen_file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(seen(app)))
        part.rename(seen_file)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    if not leak_mib_a_minute:
        return await app.run()
    leaking = asyncio.create_task(leak(leak_mib_a_minute))
    try:
        return await app.run()
    finally:
        leaking.cancel()


def seen(app: "RouterApp") -> dict[str, object]:
    """What a router believes: fields of records.WorkerSeen by worker, its open reservations, its
    name, and its memory."""
    from router.fleet.reservations.reservations import Ending

    blames = (Ending.FAILED_WORKER, Ending.FAILED_TIMEOUT, Ending.FAILED_REFUSED)
    core, view = app.core, app.view
    workers = {}
    for key, source in view.sources.items():
        load = core.fleet.loads.get(key)
        workers[key.worker_id] = {
            "held": {
                "blocks": view.index.told(source.slot),
                "digest": view.index.digest(source.slot),
            },
            "state": source.stream.state.value,
            "complete": view.complete(source),
            "excluded": core.fleet.excluded(source),
            "load": load.active_requests() if load else 0.0,
            "blocks": load.active_blocks() if load else 0.0,
            "blamed": sum(core.fleet.outcomes_of(key).get(ending, 0) for ending in blames),
        }
    return {
        "workers": workers,
        "reservations": len(core.reservations),
        "replica": core.replica,
        "memory": memory(),
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seen", type=Path, required=True, help="file that SIGUSR1 writes")
    parser.add_argument("--ahead-s", type=float, default=0.0, help="of the host's clock")
    parser.add_argument("--leak", type=float, default=0.0, help="MiB a minute, held for nothing")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it may come before there is an answer to it
    if asked.ahead_s:
        put_forward(asked.ahead_s)
    from router.app.cli.run import settle

    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    settle()  # as `kvroute serve`
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(asked.config, asked.seen, asked.leak))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
