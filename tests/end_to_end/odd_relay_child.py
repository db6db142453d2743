"""A child process for relays with faults: `python -m tests.end_to_end.odd_relay_child FAULT`.

raising: the first start of the relay of worker wN raises FAULTS[N]. endless: no relay ever ends.
"""

import asyncio
import sys

import zmq

from events.relay.relay import Relay
from router.app.programs import relay_child

FAULTS = (
    zmq.ZMQError(22),
    UnicodeError("label too long"),
    OverflowError("int too large"),
    ValueError("a port"),
    OSError(28, "no space"),
    MemoryError(),
    RecursionError(),
    KeyError("k"),
    AssertionError(),
)


def main(fault: str) -> None:
    """Runs relays as a router's child does."""
    if fault == "raising":
        faults = {f"w{i}": fault for i, fault in enumerate(FAULTS)}
        real = Relay.start

        async def start(relay: Relay) -> None:
            if error := faults.pop(relay.settings.id, None):
                raise error
            await real(relay)

        Relay.start = start  # type: ignore[method-assign]
    else:

        async def stop(_relay: Relay) -> None:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue

        Relay.stop = stop  # type: ignore[method-assign]
    relay_child.main()


if __name__ == "__main__":
    main(sys.argv[1])
