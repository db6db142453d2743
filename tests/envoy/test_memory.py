"""A picker's memory over many requests through a real Envoy.

ENVOY_REQUESTS sets how many. The picker's resident memory after each tenth is in resident_kib.txt
of the test's folder.
"""

import asyncio
import os
from pathlib import Path

from aiohttp import web

from tests.envoy.replicas import Fleet, a_fleet
from tests.stage.gateway import Worker

REQUESTS = int(os.environ.get("ENVOY_REQUESTS", "5000"))
GROWTH_KIB_MAX = 4_096
"""From the first tenth, which fills pools and caches, to the end."""


class Forgetful(Worker):
    """An engine that keeps nothing of its requests."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        return await self.play(request, await request.read())


async def _play(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"usage": {"prompt_tokens": 9, "completion_tokens": 4}})


async def test_memory_is_flat(tmp_path: Path) -> None:
    many = [Forgetful(_play), Forgetful(_play)]
    async with a_fleet(tmp_path, *many, replicas=1) as fleet:
        (picker,) = fleet.replicas
        sizes = []
        for tenth in range(10):
            await asyncio.gather(*(_client(fleet, tenth, client) for client in range(16)))
            sizes.append(picker.resident_kib)
            (tmp_path / "resident_kib.txt").write_text(f"{sizes}\n", encoding="ascii")
        await fleet.idle()
        assert sizes[-1] - sizes[0] < GROWTH_KIB_MAX


async def _client(fleet: Fleet, tenth: int, client: int) -> None:
    for number in range(client, REQUESTS // 10, 16):
        text = f"{tenth} {number} " * 100
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        async with fleet.post(body) as answer:
            await answer.read()
            assert answer.status == 200
