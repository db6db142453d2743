"""The tokens that real engines give for a body."""

import json
from typing import Any

import aiohttp

from router.request.bodies import CHAT, COMPLETION, BodyFormat

Tokens = list[int] | str
"""Ids, or the sentence with which the engine refuses."""


async def engine_tokens(
    session: aiohttp.ClientSession, address: str, engine: str, kind: BodyFormat, body: Any
) -> Tokens:
    """The prompt's ids (of a list of prompts, the first's)."""
    if engine == "vllm":
        return await _rendered(session, address, kind, body)
    return await _answered(session, address, kind, body)


async def _rendered(
    session: aiohttp.ClientSession, address: str, kind: BodyFormat, body: Any
) -> Tokens:
    """vLLM, started with --enable-scale-out."""
    result = await _post(session, address + kind.render_path, body)
    if isinstance(result, str):
        return result
    return list((result[0] if isinstance(result, list) else result)["token_ids"])


async def _answered(
    session: aiohttp.ClientSession, address: str, kind: BodyFormat, body: Any
) -> Tokens:
    """SGLang: a chat's answer says what it was computed from."""
    if kind is CHAT:
        more = {"max_tokens": 1, "return_input_ids_in_sglext": True}
        result = await _post(session, address + kind.paths[0], body | more)
        return result if isinstance(result, str) else list(result["sglext"]["input_ids"])
    if kind is COMPLETION:
        result = await _post(session, f"{address}/tokenize", body)
        if isinstance(result, str):
            return result
        tokens = result["tokens"]
        return list(tokens[0] if tokens and isinstance(tokens[0], list) else tokens)
    raise NotImplementedError(kind.name)


async def _post(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with session.post(url, data=json.dumps(body), headers=_JSON) as answer:
        text = await answer.text()
        return json.loads(text) if answer.status == 200 else f"{answer.status} {text[:300]}"


_JSON = {"Content-Type": "application/json"}
