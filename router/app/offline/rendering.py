"""Output of `kvroute render`: a body's tokens, and the first that differs from an engine's."""

import asyncio
from array import array
from collections.abc import Callable, Iterator

import click

from events.engines.access import EngineAccess
from router.config.printable import shown
from router.request.bodies import BodyFormat
from router.request.prompt_error import PromptError
from router.request.prompt_settings import RendererSettings
from router.request.proving.engine_tokens import EngineAway, EngineRefused, Engines
from router.request.rendering.renderer import Renderer

TOKENS_AROUND = 8
"""Tokens that are shown before and after the first that differs."""
ASK_S = 30.0


def show_rendered(
    settings: RendererSettings,
    kind: BodyFormat,
    data: bytes,
    engine: str,
    *,
    show_text: bool,
    against: str,
    model: str,
) -> bool:
    """Prints the body's tokens; returns whether they equal those of the engine at `against`, if
    there is one.

    Raises click.ClickException for a body or an engine that gives no tokens.
    """
    try:
        renderer = Renderer(settings)
        rendered = renderer.render(kind, data, engine)
    except PromptError as error:
        raise click.ClickException(shown(str(error))) from error
    click.echo(f"tokens     {rendered.count}")
    click.echo(f"shape      {rendered.shape}")
    click.echo(f"tokenizer  {renderer.digest}")
    if show_text:
        for line in renderer.text_of(rendered.token_bytes).split("\n"):
            click.echo(shown(line))
    if not against:
        return True
    theirs = asyncio.run(tokens_of_engine(against, engine, kind, data, model))
    lines = list(differences(rendered.token_bytes, theirs, renderer.text_of))
    click.echo("\n".join(lines) if lines else f"engine     the same {rendered.count} tokens")
    return not lines


def differences(
    ours: bytes, theirs: bytes, text_of: Callable[[bytes], str] = lambda _: ""
) -> Iterator[str]:
    """Lines about the first token that differs; none if the tokens are equal. text_of: token bytes
    -> text.
    """
    if ours == theirs:
        return
    own, other = array("I", ours), array("I", theirs)
    pairs = zip(own, other, strict=False)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))
    yield f"engine     {len(other)} tokens; the first that differs is token {place}"
    begin = max(0, place - TOKENS_AROUND)
    for name, ids in (("here", own), ("engine", other)):
        around = ids[begin : place + TOKENS_AROUND]
        yield f"  {name:8} {list(around)}  {shown(text_of(around.tobytes()))}".rstrip()


async def tokens_of_engine(
    base: str, engine: str, kind: BodyFormat, data: bytes, model: str, left_s: float = ASK_S
) -> bytes:
    """The tokens that an engine gives for the body within left_s; raises click.ClickException if it
    gives none.
    """
    engines = Engines(ask_s=ASK_S)
    try:
        answer = await engines.ask(EngineAccess(base), engine, kind, data, model, left_s=left_s)
    except (EngineAway, EngineRefused) as error:
        raise click.ClickException(shown(str(error))) from error
    finally:
        await engines.close()
    return answer.token_bytes
