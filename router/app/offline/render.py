"""The command `kvroute render`: makes a body's tokens without an engine and without a router."""

from typing import IO

import click

from router.app.cli.flags import http_base
from router.request.bodies import BY_NAME, CHAT, WITH_TOKENS
from router.request.dialects.table import DEFAULT, DIALECTS
from router.request.prompt_settings import RendererSettings


@click.command()
@click.argument("body", type=click.File("rb"))
@click.option(
    "--folder", required=True, help="Folder with the model's tokenizer files and chat template."
)
@click.option(
    "--engine",
    type=click.Choice(list(DIALECTS)),
    default=DEFAULT,
    show_default=True,
    help="Engine whose rendering of a body is reproduced.",
)
@click.option(
    "--kind",
    type=click.Choice([kind.name for kind in WITH_TOKENS.values()]),
    default=CHAT.name,
    show_default=True,
    help="Format of the body: OpenAI's chat, completion or response, Anthropic's messages, or a"
    " completion's plain text.",
)
@click.option(
    "--chat-template",
    default="",
    help="File with a chat template, as the engine's flag --chat-template names it.",
)
@click.option("--show", is_flag=True, help="Print the prompt's text, as the model reads it.")
@click.option(
    "--against",
    default="",
    callback=http_base,
    help="HTTP base of an engine that serves the model: its tokens are compared with kvroute's.",
)
@click.option(
    "--model", default="", help="Name of the model at the engine of --against, for --kind text."
)
def render(
    body: IO[bytes],
    folder: str,
    engine: str,
    kind: str,
    chat_template: str,
    show: bool,
    against: str,
    model: str,
) -> None:
    """Compute the tokens of a request's BODY (a file, or -) without an engine.

    With --against, the tokens are compared with those of an engine, and the exit code is 1 if they
    differ.
    """
    from router.app.offline.rendering import show_rendered

    settings = RendererSettings(folder=folder, chat_template=chat_template)
    same = show_rendered(
        *(settings, BY_NAME[kind], body.read(), engine),
        show_text=show,
        against=against,
        model=model,
    )
    if not same:
        raise click.exceptions.Exit(1)
