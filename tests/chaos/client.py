"""A client process: sends requests of growing sessions at a rate, and notes what became of each.

Standard input takes {"stop": true}; the process then waits for what is under way and ends.
"""

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from kvroute.client import KvRouteClient, KvRouteError
from tests.chaos.locked import CLIENTS, Lock
from tests.chaos.records import Attempt, Served
from tests.stage.channel import lines, say

PREFIXES, PREFIX_TOKENS = 8, 128
"""System prompts that sessions share, and their length."""
TURN_TOKENS = (16, 64)
PROMPT_TOKENS_MAX = 480
SESSIONS = 150
UNDER_WAY_MAX = 400
"""Requests that one client has open; past it arrivals are dropped and counted."""
CHUNK_S = 5.0
CONNECT_S = 1.0
_CACHED = re.compile(rb'"cached_tokens":(\d+)')


class EngineError(Exception):
    """An engine's answer that is none; `status` as the client's reports read it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class BrokenOff(ConnectionError):
    """An answer that ended before its end."""


class StrangeAddress(ConnectionError):
    """A pick that names no engine of this run: altered on its way."""


class Session:
    """A conversation that grows until it is too long, and begins again."""

    def __init__(self, rng: random.Random, name: str, prefixes: list[list[int]]) -> None:
        self.busy = False
        self._rng = rng
        self._name = name
        self._prefixes = prefixes
        self._lives = 0
        self._tokens: list[int] = []

    def turn(self) -> tuple[str, list[int]]:
        """The session's id, and its next prompt."""
        if not self._tokens or len(self._tokens) > PROMPT_TOKENS_MAX:
            self._lives += 1
            self._tokens = list(self._rng.choice(self._prefixes))
        count = self._rng.randint(*TURN_TOKENS)
        self._tokens = self._tokens + [self._rng.randrange(100_000) for _ in range(count)]
        return f"{self._name}-{self._lives}", self._tokens


class Client:
    """One client's traffic."""

    def __init__(self, asked: argparse.Namespace, out: Callable[[Served], object]) -> None:
        self.dropped = 0
        self._number = asked.number
        self._rng = random.Random(f"{asked.seed}/client/{asked.number}")
        self._rate = asked.rate
        self._again = asked.attempts
        self._gateways = asked.gateways
        self._ports = {*asked.engines, *asked.gateways}
        self._first_byte_s = asked.first_byte_s
        self._out = out
        shared = random.Random(f"{asked.seed}/prefixes")
        prefixes = [
            [shared.randrange(100_000) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)
        ]
        self._sessions = [
            Session(self._rng, f"{asked.number}/{i}", prefixes) for i in range(SESSIONS)
        ]
        self._lock = lock = Lock.of(asked.locks, CLIENTS)
        self._router = KvRouteClient(
            asked.routers,
            credentials=lock.credentials,
            token=lock.token,
            timeout_s=asked.route_s,
            rng=self._rng,
        )
        self._http: aiohttp.ClientSession
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Sends until `stop`, then waits for what is under way."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
        async with aiohttp.ClientSession(connector=connector) as self._http, self._router:
            next_s = time.monotonic()
            while not stop.is_set():
                next_s += self._rng.expovariate(self._rate)
                await _until(stop, next_s - time.monotonic())
                self._arrive()
            if self._under_way:
                await asyncio.wait(self._under_way)

    def summary(self) -> dict[str, Any]:
        return {
            "dropped": self.dropped,
            "reports_lost": self._router.reports_lost,
            **{f"client_{name}": count for name, count in self._router.counts.items()},
        }

    def _arrive(self) -> None:
        idle = [session for session in self._sessions if not session.busy]
        if not idle or len(self._under_way) >= UNDER_WAY_MAX:
            self.dropped += 1
            return
        task = asyncio.create_task(self._serve(self._rng.choice(idle)))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _serve(self, session: Session) -> None:
        session.busy = True
        session_id, tokens = session.turn()
        began_s = time.monotonic()
        noted: list[Attempt] = []
        failure, begun = "", False
        try:
            if self._gateways:
                await self._through_a_gateway(tokens, noted)
            else:
                await self._attempt_all(session_id, tokens, noted)
        except KvRouteError as error:
            failure = f"{type(error).__name__}: {error}"[:200]
            begun = bool(noted) and noted[-1].begun
        except (aiohttp.ClientError, OSError, TimeoutError, EngineError) as error:
            failure, begun = _named(error), bool(noted) and noted[-1].begun
        finally:
            session.busy = False
        self._out(
            Served(
                client=self._number,
                began_s=began_s,
                ended_s=time.monotonic(),
                attempts=tuple(noted),
                failure=failure,
                begun=begun,
            )
        )

    async def _attempt_all(self, session_id: str, tokens: list[int], noted: list[Attempt]) -> None:
        """Raises what the last attempt met."""
        async for attempt in self._attempts(token_ids=tokens, session_id=session_id):
            async with attempt as request:
                await self._send(request, tokens, noted)

    async def _through_a_gateway(self, tokens: list[int], noted: list[Attempt]) -> None:
        """As _send, by one of the gateways, which tries again by itself."""
        scheme = "http" if self._lock.context is None else "https"
        address = f"{scheme}://127.0.0.1:{self._rng.choice(self._gateways)}"
        sent_s, worker, failure = time.monotonic(), "", ""

        async def first_byte(name: str) -> None:
            nonlocal worker
            worker = name

        try:
            await self._stream(address, tokens, first_byte)
        except (aiohttp.ClientError, OSError, TimeoutError, EngineError) as error:
            failure = _named(error)
            raise
        finally:
            noted.append(
                Attempt(
                    sent_s=sent_s,
                    ended_s=time.monotonic(),
                    worker=worker,
                    replica="gateway",
                    failure=failure,
                    begun=bool(worker),
                )
            )

    async def _attempts(self, **options: Any) -> AsyncIterator[AbstractAsyncContextManager[Any]]:
        """One attempt after the other, each at another worker, until one is served."""
        if not self._again:
            yield self._router.request(**options)
            return
        async for attempt in self._router.attempts(**options):
            yield attempt

    async def _send(self, request: Any, tokens: list[int], noted: list[Attempt]) -> None:
        pick = request.pick
        sent_s = time.monotonic()
        begun = False
        failure = ""

        async def first_byte(_: str) -> None:
            nonlocal begun
            begun = True
            await request.prefill_done()

        try:
            request.cached_tokens = await self._stream(pick.address, tokens, first_byte)
        except (aiohttp.ClientError, OSError, TimeoutError, EngineError) as error:
            failure = _named(error)
            raise
        except asyncio.CancelledError:
            failure = "cancelled"
            raise
        finally:
            noted.append(
                Attempt(
                    sent_s=sent_s,
                    ended_s=time.monotonic(),
                    worker=pick.worker_id,
                    replica=pick.reservation_id.rpartition("-")[0],
                    failure=failure,
                    begun=begun,
                )
            )

    async def _stream(
        self, address: str, tokens: list[int], first_byte: Callable[[str], Awaitable[None]]
    ) -> int | None:
        """Sends the prompt to an engine, reads the answer; returns the cached tokens. first_byte:
        takes the worker that a gateway names."""
        scheme, _, place = address.partition("://")
        host, _, port = place.partition(":")
        if host != "127.0.0.1" or not port.isdecimal() or int(port) not in self._ports:
            raise StrangeAddress(address)
        long = self._rng.random() < 0.05
        body = {
            "prompt": tokens,
            "max_tokens": 64 if long else self._rng.randint(2, 6),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        read_s = self._first_byte_s if self._gateways else CHUNK_S
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read_s)
        headers = {"Content-Type": "application/json"}
        if scheme == "https":
            headers["Authorization"] = f"Bearer {self._lock.token}"
        async with asyncio.timeout(self._first_byte_s) as limit:
            async with self._http.post(
                f"{address}/v1/completions",
                data=msgspec.json.encode(body),
                headers=headers,
                timeout=limits,
                ssl=self._lock.context or True,
            ) as response:
                if response.status != 200:
                    raise EngineError(response.status)
                tail = await response.content.readany()
                if not tail:
                    raise BrokenOff
                limit.reschedule(None)
                await first_byte(response.headers.get("X-Kvroute-Worker", ""))
                while piece := await response.content.readany():
                    tail = tail[-500:] + piece
        if not tail.endswith(b"data: [DONE]\n\n"):
            raise BrokenOff
        cached = _CACHED.search(tail)
        return int(cached[1]) if cached else None


def _named(error: BaseException) -> str:
    match error:
        case EngineError():
            return str(error.status)
        case StrangeAddress():
            return "altered pick"
        case aiohttp.ClientConnectorError() | ConnectionRefusedError():
            return "refused"
        case TimeoutError():
            return "slow"
        case _:
            return f"broken ({type(error).__name__})"


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Waits for an event, but not for longer than so."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return


async def run(asked: argparse.Namespace) -> int:
    encoder = msgspec.json.Encoder()
    stop = asyncio.Event()
    with asked.out.open("wb", buffering=1 << 16) as out:
        client = Client(asked, lambda one: out.write(encoder.encode(one) + b"\n"))
        working = asyncio.create_task(client.run(stop))
        say(sends=True)
        async for command in lines():
            if "stop" in command:
                break
        stop.set()
        await working
    say(**client.summary())
    return 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.client", description=__doc__)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--routers", nargs="+", required=True, help="host:port of each")
    parser.add_argument("--engines", nargs="+", type=int, required=True, help="ports of all")
    parser.add_argument("--gateways", nargs="*", type=int, default=[], help="ports, if any")
    parser.add_argument("--rate", type=float, default=75.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--locks", type=Path, help="folder of TLS and tokens")
    parser.add_argument("--out", type=Path, required=True, help="file for the records")
    parser.add_argument(
        "--first-byte-s", type=float, default=2.0, help="until an answer that has not begun is left"
    )
    parser.add_argument("--route-s", type=float, default=5.0, help="for a router's answer")
    parser.add_argument("--attempts", action="store_true", help="try again before the first byte")
    asked = parser.parse_args(words)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
