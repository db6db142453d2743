"""`kvroute top`: a router's fleet and decisions on a screen that follows them."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from kvroute.client import KvRouteError
from router.app.calls.dialing import dial
from router.app.calls.top_screen import State, screen

WIDTH_MIN = 100
"""Columns, at least, of a screen that is printed once, where there is no terminal."""


async def show_top(target: str, model: str, every_s: float, *, once: bool) -> None:
    """Shows the screen until `q` or Ctrl-C, or prints it once."""
    state = State(target)
    async with dial(target) as client:
        await _look(client, model, state)
        if once or not sys.stdout.isatty():
            printed = Console(width=max(WIDTH_MIN, Console().width), highlight=False)
            printed.print(screen(state, 10_000, printed.width), crop=False)
        else:
            await _follow(client, model, every_s, state)


async def _follow(client: Any, model: str, every_s: float, state: State) -> None:
    console, left = Console(highlight=False), asyncio.Event()
    watching = asyncio.create_task(_watch(client, model, state))
    try:
        with (
            _keys(left),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                # Of the terminal now, whatever COLUMNS and LINES said when the shell began.
                console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
                live.update(screen(state, console.height, console.width), refresh=True)
                try:
                    async with asyncio.timeout(every_s):
                        await left.wait()
                    return
                except TimeoutError:
                    pass
                try:
                    await _look(client, model, state)
                    state.trouble = ""
                except KvRouteError as error:  # the next look may succeed
                    state.trouble = f"old numbers: {error}"
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _look(client: Any, model: str, state: State) -> None:
    """Reads the fleet and the queue; raises KvRouteError."""
    workers, queue = await asyncio.gather(
        client.list_workers(model or None), client.list_queue(model or None, limit=1)
    )
    state.look(workers, queue, asyncio.get_running_loop().time())


async def _watch(client: Any, model: str, state: State) -> None:
    try:
        async for response in client.watch_decisions(model=model):
            state.decisions.extend(response.decisions)
    except KvRouteError as error:
        state.unwatched = f"no decisions: {error}"


@contextmanager
def _keys(left: asyncio.Event) -> Iterator[None]:
    """Sets the event when `q` is pressed; meanwhile the terminal delivers keys without Enter."""
    if not sys.stdin.isatty():
        yield
        return
    loop, file = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def read() -> None:
        if sys.stdin.read(1) in ("q", "Q", ""):
            left.set()

    tty.setcbreak(file)
    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
