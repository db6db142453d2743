"""A stand-in engine that gives tokens over HTTP, and a wait for the prompts' own work."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from events.engines.access import EngineAccess
from router.request import bodies
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from router.request.tokens import EngineAt, Prompts

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = bodies.CHAT


def chat(content: str = "hello") -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


class StandIn:
    """An engine's HTTP API in front of the renderer: /tokenize, and the render endpoints."""

    def __init__(
        self,
        settings: RendererSettings,
        *,
        renders: bool = False,
        lacks: frozenset[str] = frozenset(),
    ) -> None:
        """lacks: paths of render endpoints that it has not, though it renders."""
        self.renderer = Renderer(settings)
        self.renders = renders
        self.lacks = lacks
        self.asked: list[str] = []
        self.address = ""
        self.answer: Callable[[], web.Response] | None = None

    @property
    def access(self) -> EngineAccess:
        return EngineAccess(self.address)

    def at(self, identity: str = "w0/1") -> EngineAt:
        worker_id = identity.partition("/")[0]
        return EngineAt("vllm", "0.32.0", self.address, identity, "m", worker_id)

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.answer is not None:
            return self.answer()
        renders = request.path.endswith("/render")
        if renders and (not self.renders or request.path in self.lacks):
            raise web.HTTPNotFound
        body = await request.read()
        kind = bodies.COMPLETION if "prompt" in json.loads(body) else CHAT
        try:
            done = self.renderer.render(kind, body, "vllm")
        except PromptError as error:
            return web.json_response({"error": error.message}, status=400)
        ids = array("I", done.token_bytes).tolist()
        if not renders:
            return web.json_response({"count": len(ids), "tokens": ids})
        features = {
            "mm_hashes": {"image": ["ab" * 32]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
        }
        rendered = {"request_id": "r", "token_ids": ids, "features": features}
        return web.json_response(
            [rendered] if "completions/render" not in request.path else rendered
        )


@asynccontextmanager
async def serving(stand_in: StandIn) -> AsyncIterator[StandIn]:
    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/{path:.*}", stand_in.tokenize)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stand_in.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stand_in
    finally:
        await runner.cleanup()


async def quiet(prompts: Prompts) -> None:
    """Canaries and audits that began have ended."""
    while prompts._tasks:
        await asyncio.wait(set(prompts._tasks))
