"""Waiting for what sockets and processes bring about, and ports for processes that start later."""

import asyncio
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable

DEADLINE_S = 60.0


async def until(condition: Callable[[], object], told: str, pause_s: float = 0.005) -> None:
    """Waits for something that sockets bring about; fails after a while, saying what for.

    pause_s: between two looks; 0: a turn of the loop.
    """
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110  # what sockets bring sets no event here
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:g} s in vain for: {told}") from None


_PORTS = range(12_000, 20_000)
"""Below those that Linux gives to sockets that name none (net.ipv4.ip_local_port_range), and those
of tests/chaos."""
_given: deque[int] = deque(maxlen=len(_PORTS) // 2)


def taken(port: int) -> bool:
    """Whether a port of loopback can't be listened on, or was given to somebody just now."""
    if port in _given:
        return True
    with socket.socket() as found:
        try:
            found.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """A port of loopback that nobody has at the moment, for a process that is started later, and
    not one of the last 4,000 that this process was given: whoever got one may not listen yet.

    The kernel's own choice would not do: it may give the same port to a socket that is opened in
    the meantime.
    """
    rng = random.SystemRandom()  # two runs at once on one machine must differ
    while True:
        if not taken(port := rng.choice(_PORTS)):
            _given.append(port)
            return port


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, each as of `free_port`."""
    while True:
        ports = range(first := free_port(), first + count)
        if not any(map(taken, ports[1:])):
            _given.extend(ports[1:])
            return first


def accepts(port: int) -> bool:
    """Whether somebody listens on a loopback port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def repeated(
    act: Callable[[], Awaitable[object]], condition: Callable[[], object], told: str
) -> None:
    """Acts again and again until the condition holds: for messages that a connection may lose,
    which a busy machine has made again meanwhile."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await act()
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:g} s in vain for: {told}") from None
