"""A client that sends the largest and strangest messages that it may, and lies in its reports.

Standard input takes {"stop": true}, {"drain": WORKER, "router": i, "undrain": bool} and
{"flood": SECONDS}: messages on a worker's own subjects, as many as the socket takes, of a relay
that has gone mad. Everything that it reserves it gives back, or leaves to the lease.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from kvroute.client import KvRouteClient, KvRouteError
from kvroute.v1 import (
    FailureReason,
    Progress,
    ProgressState,
    RegisterWorkerRequest,
    RemoveWorkerRequest,
    ReportRequest,
    RouterAsyncStub,
    RouteRequest,
    RouteResponse,
)
from kvroute.v1.fleet_pb2_grpc import FleetStub
from tests.chaos.locked import HOSTILE, Lock
from tests.stage.channel import lines, say

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
FLOOD_WORKER = "flood"
FLOOD_PER_S = 50_000
_CALL_S = 5.0
_ROUTER = "/kvroute.v1.Router/"
_STRANGE = ("", "\0", "../../etc/passwd", "a" * 5000, "w.>", "*", "[red]x[/]", "\u202e" * 50, "%2e")


class Hostile:
    """One hostile client of several routers."""

    def __init__(self, routers: list[str], rng: random.Random, lock: Lock) -> None:
        self.counts: Counter[str] = Counter()
        """What was sent and how it was answered."""
        self._rng = rng
        self._channels = [lock.channel(one, OPTIONS) for one in routers]
        self._clients = [
            KvRouteClient(one, credentials=lock.credentials, token=lock.token) for one in routers
        ]
        self._tricks: list[Callable[[grpc.aio.Channel], Awaitable[object]]] = [
            self.long_prompt,
            self.raw_bytes,
            self.many_steps,
            self.strange_names,
            self.lies,
            self.bad_engine,
            self.silly_tombstone,
            self.half_a_stream,
            self.watches,
            self.abandoned,
        ]

    async def run(self, every_s: float, stop: asyncio.Event) -> None:
        while not stop.is_set():
            trick = self._rng.choice(self._tricks)
            channel = self._rng.choice(self._channels)
            try:
                async with asyncio.timeout(4 * _CALL_S):
                    await trick(channel)
                answered = "OK"
            except grpc.aio.AioRpcError as error:
                answered = error.code().name
            except TimeoutError:
                answered = "no answer"
            self.counts[f"{trick.__name__}: {answered}"] += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await stop.wait()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        for client in self._clients:
            await client.close()

    async def drain(self, router: int, worker: str, *, undrain: bool) -> str:
        """What the router answered: empty, or its error."""
        client = self._clients[router]
        try:
            await (client.undrain_worker(worker) if undrain else client.drain_worker(worker))
        except KvRouteError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    # --- tricks ---

    async def long_prompt(self, channel: grpc.aio.Channel) -> None:
        """A million tokens and more, as varints; as bytes; 63 million at times."""
        tokens = self._rng.choice([100_000, 1_000_000, 1_900_000])
        request = RouteRequest(model="stand-in")
        if self._rng.random() < 0.5:
            request.token_ids.ids.extend([self._rng.randrange(1 << 31)] * tokens)
        else:
            request.token_bytes = self._rng.randbytes(4 * tokens)
        await self._give_back(
            channel, await RouterAsyncStub(channel).Route(request, timeout=_CALL_S)
        )

    async def raw_bytes(self, channel: grpc.aio.Channel) -> None:
        """No protobuf at all, or what is barely one, as large as any limit."""
        size = self._rng.choice([0, 1, 1000, 1 << 18, 1 << 20, 8 << 20, 16 << 20, 60 << 20])
        body = self._rng.choice(
            [
                b"\x1a\x00" * (size // 2),  # empty TokenIds, again and again
                b"\x0a\x00" * (size // 2),  # empty steps of a Report
                b"\x2a\x00" * (size // 2),  # empty hashes; empty images elsewhere
                b"\x0b" * min(size, 5000),  # groups that never end
                b"\xff" * min(size, 1 << 20),
                self._rng.randbytes(min(size, 1 << 20)),
            ]
        )
        method = self._rng.choice(["Route", "Report", "Explain"])
        await channel.unary_unary(_ROUTER + method)(body, timeout=_CALL_S)

    async def many_steps(self, channel: grpc.aio.Channel) -> None:
        """As many steps of other callers' reservations as a Report may hold, by guessed names."""
        ended = ProgressState.PROGRESS_STATE_FINISHED
        first = self._rng.randrange(100_000)
        steps = [Progress(reservation_id=f"router-{first + i}", state=ended) for i in range(30_000)]
        await RouterAsyncStub(channel).Report(ReportRequest(progress=steps), timeout=_CALL_S)

    async def strange_names(self, channel: grpc.aio.Channel) -> None:
        """Names that are paths, wildcards, markup, control characters, or very long."""
        name = self._rng.choice(_STRANGE)
        steps = [Progress(reservation_id=f"{name}-1", state=ProgressState.PROGRESS_STATE_RUNNING)]
        await RouterAsyncStub(channel).Report(ReportRequest(progress=steps), timeout=_CALL_S)
        request = RouteRequest(
            request_id=name,
            model=self._rng.choice(["stand-in", name]),
            lora_name=name,
            cache_salt=name,
            tenant=name,
            session_id=name,
            policy=self._rng.choice(["", name]),
            priority=self._rng.choice([-(1 << 31), (1 << 31) - 1]),
            expected_output_tokens=self._rng.choice([0, (1 << 32) - 1]),
            required_labels={name: name} if self._rng.random() < 0.5 else {},
            excluded_worker_ids=[name] * self._rng.choice([0, 1000]),
            token_bytes=self._rng.randbytes(4 * self._rng.choice([1, 100, 1000])),
        )
        await self._give_back(
            channel, await RouterAsyncStub(channel).Route(request, timeout=_CALL_S)
        )

    async def lies(self, channel: grpc.aio.Channel) -> None:
        """Ten requests, each reported as failed by its worker's fault."""
        for _ in range(10):
            request = RouteRequest(model="stand-in", token_bytes=self._rng.randbytes(400))
            picked = await RouterAsyncStub(channel).Route(request, timeout=_CALL_S)
            await self._give_back(channel, picked, FailureReason.FAILURE_REASON_WORKER)

    async def bad_engine(self, channel: grpc.aio.Channel) -> None:
        """Has the router run a relay for an engine that can't be; takes it back again."""
        fleet = FleetStub(channel)  # type: ignore[no-untyped-call]
        name = f"bad-{self._rng.randrange(5)}"
        odd = ("nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:1", "tcp://[::1", "ipc://\0", "")
        asked = RegisterWorkerRequest(
            worker_id=self._rng.choice([name, name, *_STRANGE]),
            engine="vllm",
            address=self._rng.choice(["http://127.0.0.1:1", "http://127.0.0.1:99999", "x"]),
            events=self._rng.choice(odd),
            replay=self._rng.choice(odd),
            metrics=self._rng.choice(["http://127.0.0.1:1", "http://a..b", "ftp://x", ""]),
        )
        await fleet.RegisterWorker(asked, timeout=_CALL_S)
        gone = RemoveWorkerRequest(worker_id=asked.worker_id, tombstone_s=1.0)
        await fleet.RemoveWorker(gone, timeout=_CALL_S)

    async def silly_tombstone(self, channel: grpc.aio.Channel) -> None:
        """Removes a worker that nobody has for longer than the sun will shine."""
        fleet = FleetStub(channel)  # type: ignore[no-untyped-call]
        for seconds in (1e300, -1.0, float("nan"), float("inf")):
            gone = RemoveWorkerRequest(worker_id="nobody", tombstone_s=seconds)
            await fleet.RemoveWorker(gone, timeout=_CALL_S)

    async def half_a_stream(self, channel: grpc.aio.Channel) -> None:
        """Opens streams, sends something that is no batch, or a batch and goes."""
        for _ in range(5):
            call = channel.stream_stream(_ROUTER + "RouteStream")()
            size = self._rng.choice([1, 1 << 10, 1 << 20])
            await call.write(self._rng.choice([b"", b"\x0a\x00" * size, self._rng.randbytes(size)]))
            await asyncio.sleep(0.01)
            call.cancel()

    async def watches(self, channel: grpc.aio.Channel) -> None:
        """Twenty watchers that never read."""
        calls = [channel.unary_stream("/kvroute.v1.Fleet/WatchWorkers")(b"") for _ in range(20)]
        await asyncio.sleep(0.5)
        for call in calls:
            call.cancel()

    async def abandoned(self, channel: grpc.aio.Channel) -> None:
        """Routes whose answers nobody waits for, and some that are left to the lease."""
        stub = RouterAsyncStub(channel)
        calls = []
        for _ in range(20):
            request = RouteRequest(model="stand-in", token_bytes=self._rng.randbytes(4000))
            calls.append(stub.Route(request, timeout=_CALL_S))
        await asyncio.sleep(self._rng.uniform(0.0, 0.02))
        for call in calls:
            call.cancel()

    async def _give_back(
        self,
        channel: grpc.aio.Channel,
        picked: RouteResponse,
        reason: FailureReason.ValueType = FailureReason.FAILURE_REASON_CLIENT,
    ) -> None:
        if self._rng.random() < 0.05:
            return
        step = Progress(
            reservation_id=picked.reservation_id,
            state=ProgressState.PROGRESS_STATE_FAILED,
            failure_reason=reason,
        )
        await RouterAsyncStub(channel).Report(ReportRequest(progress=[step]), timeout=_CALL_S)


async def flood(nats_port: int, seconds: float) -> int:
    """One-byte facts of a worker of its own, from the wire up; returns how many were sent."""
    subject = f"kvroute.v1.default.facts.{FLOOD_WORKER}.0"
    count = FLOOD_PER_S // 50
    burst = f"PUB {subject} 1\r\nx\r\n".encode() * count
    sent, until_s = 0, time.monotonic() + seconds
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", nats_port)
    except OSError:
        return 0  # NATS is away
    reading = asyncio.create_task(reader.read(-1))
    try:
        writer.write(b'CONNECT {"verbose":false,"pedantic":false,"protocol":1}\r\n')
        while time.monotonic() < until_s and not reading.done():
            writer.write(burst)
            await writer.drain()
            sent += count
            await asyncio.sleep(0.02)
    except OSError:
        return sent
    finally:
        reading.cancel()
        writer.close()
    return sent


async def run(asked: argparse.Namespace) -> int:
    rng = random.Random(f"{asked.seed}/hostile")
    stop = asyncio.Event()
    hostile = Hostile(asked.routers, rng, Lock.of(asked.locks, HOSTILE))
    working = asyncio.create_task(hostile.run(asked.every_s, stop))
    say(sends=True)
    async for command in lines():
        if "stop" in command:
            break
        say(**await obey(command, hostile, asked.nats_port))
    stop.set()
    await working
    await hostile.close()
    say(**hostile.counts)
    return 0


async def obey(command: dict[str, Any], hostile: Hostile, nats_port: int) -> dict[str, object]:
    if "drain" in command:
        error = await hostile.drain(command["router"], command["drain"], undrain=command["undrain"])
        return {"error": error}
    return {"flooded": await flood(nats_port, command["flood"])}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hostile", description=__doc__)
    parser.add_argument("--routers", nargs="+", required=True, help="host:port of each")
    parser.add_argument("--locks", type=Path, help="folder of TLS and tokens")
    parser.add_argument("--nats-port", type=int, required=True)
    parser.add_argument("--every-s", type=float, default=0.5, help="between two tricks")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
