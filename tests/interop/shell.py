"""Clients of other languages, each a program that makes the calls that its standard input names.

A line is a JSON object, a call; calls run beside one another, and the answer to each is a line of
the output, with the call's id. The program's only argument is a JSON object: target, ca,
certificate and key (paths; "": plain text), keepalive_s (0: none).

    {"id": 1, "op": "call", "method": "/kvroute.v1.Router/Route", "message": BASE64, ...}
    {"id": 1, "code": 0, "words": "", "answers": 1, "answer": BASE64, "details": BASE64}
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc.status_pb2 import Status

from tests.interop.languages import CLIENTS

LINE_BYTES_MAX = 1 << 26
GUARD_S = 120.0
"""The deadline of a call that does not test deadlines."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode
    words: str
    answers: int
    """Messages that came back."""
    answer: bytes
    """The last of these."""
    details: Status | None

    @classmethod
    def of(cls, said: dict[str, Any]) -> "Outcome":
        (code,) = (one for one in grpc.StatusCode if one.value[0] == said["code"])
        details = base64.b64decode(said["details"] or "")
        return cls(
            code,
            said["words"],
            said["answers"],
            base64.b64decode(said["answer"] or ""),
            Status.FromString(details) if details else None,
        )


class Shell:
    """A client that runs, with one channel."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, message: bytes = b"", **about: Any) -> Outcome:
        """A unary call. about: timeout_s, gzip, metadata, cancel_s."""
        return await self._run(op="call", method=method, message=message, **about)

    async def stream(
        self, method: str, message: bytes = b"", count: int = 1, **about: Any
    ) -> Outcome:
        """A stream of `count` equal messages, and the stream of answers. about: as for a call, and
        cancel_after: answers after which it is cancelled."""
        return await self._run(op="stream", method=method, message=message, count=count, **about)

    async def _run(
        self,
        *,
        message: bytes,
        timeout_s: float = GUARD_S,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        count: int = 1,
        gzip: bool = False,
        cancel_s: float = 0.0,
        cancel_after: int = 0,
        **about: Any,
    ) -> Outcome:
        pairs = [
            (name, base64.b64encode(value).decode() if isinstance(value, bytes) else value)
            for name, value in metadata
        ]
        number = len(self._waiting) + 1
        wanted = about | {
            "id": number,
            "message": base64.b64encode(message).decode(),
            "timeout_s": timeout_s,
            "metadata": pairs,
            "count": count,
            "gzip": gzip,
            "cancel_s": cancel_s,
            "cancel_after": cancel_after,
        }
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        async with asyncio.timeout(GUARD_S + 30.0):
            return await future

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            self._waiting[said["id"]].set_result(Outcome.of(said))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AssertionError("the client has ended"))

    async def end(self) -> None:
        """Ends the program."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading


@asynccontextmanager
async def a_shell(
    language: str,
    target: str,
    *,
    ca: str = "",
    certificate: str = "",
    key: str = "",
    keepalive_s: int = 0,
) -> AsyncIterator[Shell]:
    """A client of a server."""
    given = {
        "target": target,
        "ca": ca,
        "certificate": certificate,
        "key": key,
        "keepalive_s": keepalive_s,
    }
    process = await asyncio.create_subprocess_exec(
        *CLIENTS[language].command(),
        json.dumps(given),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    shell = Shell(process)
    try:
        yield shell
    finally:
        await shell.end()
