"""A plain HTTP/1.1 client of OpenAI's API, which keeps its connections and sends nothing twice.

    python -m tests.cluster.load '{"url": ..., "host": ..., "ca": ..., "token": ..., "model": ...,
        "rate": 5, "stream": 0.5, "long_tokens": 0}'

It sends chats at `rate` a second until SIGTERM or SIGINT, then waits for the answers that are due,
and prints one JSON object: `sent`; `failed`, a list of what failed, each with `begun`: whether an
answer's first bytes had come; and `pairs`, by "PREFILL DECODE" the answers of these two workers, as
the gateway's headers name them. `host` is the name in the server's certificate. `long_tokens`
keeps a stream of that many tokens going beside the chats.
"""

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp

from tests.cluster.cluster import Cluster

KINDS = 8
"""Prompts begin with one of as many system prompts."""


class Load:
    """The client as a process in the cluster's network; `with` ends it, and waits for answers."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.cluster.load", json.dumps(options)]
        self._process = subprocess.Popen(
            cluster.nodes[0].inside(command), stdout=subprocess.PIPE, text=True
        )
        self.sent = 0
        self.failed: list[dict[str, Any]] = []
        self.pairs: dict[str, int] = {}

    def __enter__(self) -> "Load":
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the first answer has come
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        out, _ = self._process.communicate(timeout=400)
        if kind is None:
            counted = json.loads(out.splitlines()[-1])
            self.sent, self.failed = counted["sent"], counted["failed"]
            self.pairs = counted["pairs"]


class _Client:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.sent = 0
        self.failed: list[dict[str, Any]] = []
        self.pairs: Counter[str] = Counter()
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self.stopping.set)
        ca = self.options.get("ca")
        context = ssl.create_default_context(cafile=ca) if ca else False
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=300)
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            await self._chat(session, 0)
            sys.stdout.write("begun\n")
            sys.stdout.flush()
            if tokens := self.options.get("long_tokens"):
                tasks.create_task(self._long(session, tokens))
            begun = time.monotonic()
            while not self.stopping.is_set():
                tasks.create_task(self._chat(session, self.sent))
                due = begun + self.sent / self.options["rate"]
                await self._pause(due - time.monotonic())
        counted = {"sent": self.sent, "failed": self.failed, "pairs": self.pairs}
        sys.stdout.write(json.dumps(counted) + "\n")

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0, seconds)):
                await self.stopping.wait()
        except TimeoutError:
            pass

    async def _long(self, session: aiohttp.ClientSession, tokens: int) -> None:
        while not self.stopping.is_set():
            await self._chat(session, self.sent, tokens)

    async def _chat(self, session: aiohttp.ClientSession, number: int, tokens: int = 0) -> None:
        self.sent += 1
        stream = bool(tokens) or number % 100 < 100 * self.options.get("stream", 0.5)
        wanted = tokens or 8 + number % 24
        body = {
            "model": self.options["model"],
            "max_tokens": wanted,
            "min_tokens": wanted,
            "ignore_eos": True,
            "stream": stream,
            "messages": [
                {"role": "system", "content": f"You are helper {number % KINDS}. " * 30},
                {"role": "user", "content": f"Question {number}"},
            ],
        }
        headers = {"Host": self.options.get("host", "")} if self.options.get("host") else {}
        if token := self.options.get("token"):
            headers["Authorization"] = f"Bearer {token}"
        begun, sent_at = False, time.monotonic()
        try:
            async with session.post(
                self.options["url"],
                json=body,
                headers=headers,
                server_hostname=self.options.get("host") or None,
            ) as response:
                text = ""
                async for chunk in response.content.iter_any():
                    begun = True
                    text += chunk.decode(errors="replace")
            if response.status != 200:
                begun = False  # an error is no answer
                raise ValueError(f"{response.status} {text[:300]}")
            if stream and "data: [DONE]" not in text:
                raise ValueError(f"a stream without its end: ...{text[-200:]}")
            if tokens and text.count('"content":') < tokens:
                raise ValueError(f"{text.count(chr(10))} lines for {tokens} tokens")
            if not stream and not json.loads(text)["choices"]:
                raise ValueError(f"no choice: {text[:200]}")
            if prefill := response.headers.get("X-Kvroute-Prefill-Worker"):
                self.pairs[f"{prefill} {response.headers['X-Kvroute-Worker']}"] += 1
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.failed.append(
                {
                    "begun": begun,
                    "error": f"{type(error).__name__} {error}"[:400],
                    "at": time.strftime("%T"),
                    "after_s": round(time.monotonic() - sent_at, 2),
                    "long": bool(tokens),
                }
            )


if __name__ == "__main__":
    asyncio.run(_Client(json.loads(sys.argv[1])).run())
