"""What the router renders prompts with in tests: the tiny tokenizer, under two chat templates."""

from pathlib import Path

from router.request.prompt_settings import RendererSettings
from router.request.tokens import ModelPrompts, Source
from tests.stage.prompts.engine import TEMPLATE
from tests.stage.prompts.tiny_tokenizer import make_folder

OTHER_TEMPLATE = TEMPLATE.replace("assistant\n", "assistant\nSure: ")


def of_template(folder: Path, template: str = TEMPLATE) -> RendererSettings:
    """Writes a tokenizer's folder."""
    return RendererSettings(folder=str(make_folder(folder, template)))


def local(renderer: RendererSettings) -> ModelPrompts:
    """A model whose prompts one child of the router renders."""
    return ModelPrompts(source=Source.LOCAL, renderer=renderer, processes=1)
