"""A client of gRPC's C-core (grpcio) that does what its standard input says: see shell.py."""

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio


def channel_of(given: dict[str, Any]) -> grpc.aio.Channel:
    """To a server."""
    options: list[tuple[str, int]] = [("grpc.max_receive_message_length", -1)]
    if given["keepalive_s"]:
        options += [
            ("grpc.keepalive_time_ms", given["keepalive_s"] * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if not given["ca"]:
        return grpc.aio.insecure_channel(given["target"], options=options)
    pair = [Path(given[name]).read_bytes() if given[name] else None for name in _PAIR]
    credentials = grpc.ssl_channel_credentials(Path(given["ca"]).read_bytes(), *pair)
    return grpc.aio.secure_channel(given["target"], credentials, options=options)


_PAIR = ("key", "certificate")


async def run(channel: grpc.aio.Channel, wanted: dict[str, Any]) -> dict[str, Any]:
    """A call."""
    message = base64.b64decode(wanted["message"])
    about: dict[str, Any] = {
        "timeout": wanted["timeout_s"],
        "compression": grpc.Compression.Gzip if wanted["gzip"] else None,
        "metadata": [
            (name, base64.b64decode(value) if name.endswith("-bin") else value)
            for name, value in wanted["metadata"]
        ],
    }
    call: Any
    if wanted["op"] == "call":
        call = channel.unary_unary(wanted["method"])(message, **about)
    else:

        async def messages() -> AsyncIterator[bytes]:
            for _ in range(wanted["count"]):
                yield message

        call = channel.stream_stream(wanted["method"])(messages(), **about)
    if wanted["cancel_s"]:
        asyncio.get_running_loop().call_later(wanted["cancel_s"], call.cancel)
    answers, answer = 0, b""
    try:
        if wanted["op"] == "call":
            answers, answer = 1, await call
        else:
            async for one in call:
                answer = one
                answers += 1
                if answers == wanted["cancel_after"]:
                    call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        answers = answers if wanted["op"] == "stream" else 0
    trailers = dict(await call.trailing_metadata() or ())
    return {
        "id": wanted["id"],
        "code": (await call.code()).value[0],
        "words": await call.details(),
        "answers": answers,
        "answer": base64.b64encode(answer).decode(),
        "details": base64.b64encode(trailers.get("grpc-status-details-bin", b"")).decode(),
    }


async def main() -> None:
    channel = channel_of(json.loads(sys.argv[1]))
    tasks: set[asyncio.Task[None]] = set()

    async def do(wanted: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(await run(channel, wanted)) + "\n")
        sys.stdout.flush()

    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.create_task(do(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main())
