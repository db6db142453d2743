"""A completion by tokens of its own: TEXT."""

import asyncio
import sys

import aiohttp

from kvroute.client import KvRouteClient

ROUTER, ENGINE, MODEL = "127.0.0.1:50051", "http://127.0.0.1:8000", "my-model"


async def main(text: str) -> None:
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        KvRouteClient(ROUTER) as router,
    ):
        async with http.post(f"{ENGINE}/tokenize", json={"model": MODEL, "prompt": text}) as answer:
            tokens = (await answer.json())["tokens"]
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 16}
        async with router.request(token_ids=tokens, model=MODEL) as request:
            pick = request.pick
            url = f"{pick.address}/v1/completions"
            async with http.post(url, json=body, headers=pick.headers) as response:
                answer = await response.json()
            request.read_usage(answer["usage"], details_enabled=True)
    print(answer["choices"][0]["text"])
    print(f"{pick.overlap_tokens.usable} predicted, {request.cached_tokens} reported")


asyncio.run(main(" ".join(sys.argv[1:])))
