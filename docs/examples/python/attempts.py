"""A chat whose failures are retried on another worker: TEXT."""

import asyncio
import sys

import aiohttp

from kvroute.client import KvRouteClient

ROUTER, MODEL = "127.0.0.1:50051", "my-model"


async def chat(router: KvRouteClient, http: aiohttp.ClientSession, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 16}
    reply = ""
    async for attempt in router.attempts(chat_completion_body=body):
        async with attempt as request:  # a failure in here is retried on another worker
            async with http.post(
                request.url, data=request.body, headers=request.headers
            ) as response:
                answer = await response.json()
            request.read_usage(answer["usage"], details_enabled=True)
            reply = answer["choices"][0]["message"]["content"]
    return reply


async def main(text: str) -> None:
    limits = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(raise_for_status=True, timeout=limits) as http,
        KvRouteClient(ROUTER) as router,
    ):
        print(await chat(router, http, text))
        print(router.counts["attempts"], "attempts", file=sys.stderr)


asyncio.run(main(" ".join(sys.argv[1:])))
