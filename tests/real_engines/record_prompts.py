"""Captures what real engines make of the bodies, and compares them with the dialects.

usage: python -m tests.real_engines.record_prompts --build build/real-engines [--random 300]

Needs the installation of `make real-engines`. Starts each engine on loopback once a template,
sends it every body of tests/stage/prompts/bodies.py and random ones, prints each difference, and
rewrites tests/router/request/golden/. About a minute for each of the six engines on two free cores.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from router.request import bodies
from router.request.dialects.table import DIALECTS
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.rendering.encoder import token_bytes
from router.request.rendering.renderer import Renderer
from tests.real_engines.chat_model import BLOCKS, CLASSES, FLAGS, make_room
from tests.real_engines.engines import Engine
from tests.real_engines.prompt_tokens import Tokens, engine_tokens
from tests.stage.prompts.bodies import random_chat
from tests.stage.prompts.captures import TEMPLATES, cases, digest_of, write_cases
from tests.stage.prompts.responses import random_response

GOLDEN = Path(__file__).resolve().parents[1] / "router" / "request" / "golden"
START_S = 300.0


async def main(build: Path, randoms: int) -> int:
    """The number of bodies whose tokens differ."""
    differ = 0
    async with aiohttp.ClientSession() as session:
        for engine in DIALECTS:
            for template in TEMPLATES:
                with tempfile.TemporaryDirectory() as room:
                    differ += await _recorded(session, build, Path(room), engine, template, randoms)
    return differ


async def _recorded(
    session: aiohttp.ClientSession,
    build: Path,
    room: Path,
    engine: str,
    template: str,
    randoms: int,
) -> int:
    folder = make_room(build, room, TEMPLATES[template])
    started = CLASSES[engine](
        f"{engine}-{template}",
        *(room, room, room, session),
        blocks=BLOCKS[engine],
        flags=FLAGS[engine],
    )
    await started.child.start()
    try:
        await _ready(started)
        run = _Run(session, started.address, engine, folder)
        captured = {
            f"{kind.name}/{name}": await run.capture(kind, name, body)
            for kind, name, body in cases(engine)
        }
        rng = random.Random(template)
        for number in range(randoms):
            await run.capture(bodies.CHAT, f"random {number}", random_chat(rng))
            if DIALECTS[engine].has_render:
                await run.capture(bodies.RESPONSES, f"random {number}", random_response(rng))
        path = GOLDEN / f"{engine}-{template}.json"
        write_cases(path, f"{engine} {await started.version()}", captured)
        print(f"{path.name}: {run.equal} equal, {run.different} different", flush=True)  # noqa: T201
        return run.different
    finally:
        await started.child.stop()


class _Run:
    """Bodies that go to one engine and to the renderer."""

    def __init__(
        self, session: aiohttp.ClientSession, address: str, engine: str, folder: Path
    ) -> None:
        self.equal = self.different = 0
        self._asked = (session, address, engine)
        self._engine = engine
        self._renderer = Renderer(RendererSettings(folder=str(folder)))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def capture(self, kind: bodies.BodyFormat, name: str, body: Any) -> dict[str, Any]:
        result = await engine_tokens(*self._asked, kind, body)
        ours = self._ours(kind, body)
        if result == ours or (isinstance(result, str) and isinstance(ours, str)):
            self.equal += 1
        else:
            self.different += 1
            print(f"{kind.name}/{name}\n  engine {self._text(result)}\n  ours   {self._text(ours)}")  # noqa: T201
        if isinstance(result, str):
            return {"refused": True}
        return {"digest": digest_of(token_bytes(result)), "text": self._text(result)}

    def _ours(self, kind: bodies.BodyFormat, body: Any) -> Tokens:
        try:
            result = self._renderer.render(kind, json.dumps(body).encode(), self._engine)
        except PromptError as error:
            return str(error)
        return array("I", result.token_bytes).tolist()

    def _text(self, tokens: Tokens) -> str:
        if isinstance(tokens, str):
            return tokens
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


async def _ready(engine: Engine) -> None:
    async with asyncio.timeout(START_S):
        while not await engine.answers():
            if not engine.child.running:
                raise RuntimeError(engine.child.last_words())
            await asyncio.sleep(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, default=Path("build/real-engines"))
    parser.add_argument("--random", type=int, default=300, help="random chats for each engine")
    given = parser.parse_args()
    sys.exit(bool(asyncio.run(main(given.build, given.random))))
