"""Reads from the configuration how the tokens of each model's prompts are made."""

from collections.abc import Iterable

from router.config.settings.configurations import ModelSettings
from router.config.settings.prompt_settings import PromptsSettings
from router.request.prompt_settings import RendererSettings
from router.request.tokens import ModelPrompts, Source


def model_prompts(models: Iterable[ModelSettings]) -> dict[str, ModelPrompts]:
    """Prompt settings by model name; models without a section of their own are left out."""
    return {model.name: _of(model.prompts) for model in models if model.prompts is not None}


def _of(settings: PromptsSettings) -> ModelPrompts:
    renderer = None
    if settings.folder:
        renderer = RendererSettings(
            folder=settings.folder,
            chat_template=settings.chat_template,
            chat_template_kwargs=settings.chat_template_kwargs,
            content_format=settings.content_format,
            tools_dropped=settings.tools_dropped,
        )
    return ModelPrompts(
        source=Source(settings.source),
        renderer=renderer,
        render=settings.render,
        processes=settings.processes,
    )
