"""Chat templates, and the bodies that tests/router/request/golden has an engine's tokens of."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from router.request import bodies
from tests.stage.prompts.bodies import CHATS, COMPLETIONS, MESSAGES
from tests.stage.prompts.responses import RESPONSES

_FOLDER = Path(__file__).resolve().parent / "templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(_FOLDER.glob("*.jinja"))}


def cases(engine: str) -> Iterator[tuple[bodies.BodyFormat, str, Any]]:
    """All bodies that this kind of engine can be asked about."""
    yield from ((bodies.CHAT, name, body) for name, body in CHATS.items())
    for name, body in COMPLETIONS.items():
        if engine == "vllm" or name != "ids":  # its /tokenize takes text
            yield bodies.COMPLETION, name, body
    if engine == "vllm":
        yield from ((bodies.MESSAGES, name, body) for name, body in MESSAGES.items())
        yield from ((bodies.RESPONSES, name, body) for name, body in RESPONSES.items())


def digest_of(data: bytes) -> str:
    """Of token bytes."""
    return sha256(data).hexdigest()[:16]


def write_cases(path: Path, engine: str, made: Mapping[str, Any]) -> None:
    """A file of what an engine made of each body, one body a line."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in made.items()
    )
    path.write_text(
        f'{{"engine": {json.dumps(engine)}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    )
