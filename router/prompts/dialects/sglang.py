"""The body as SGLang gives it to a chat template. Pure."""

from router.prompts.body import Body
from router.prompts.dialects.dialect import ModelFacts, TemplateInput
from router.prompts.dialects.messages import checked_messages


def to_template(body: Body, facts: ModelFacts) -> TemplateInput:
    """The template's input for a chat. Raises PromptError."""
    kwargs = body.fields.get("chat_template_kwargs") or {}
    return TemplateInput(
        checked_messages(body.fields),
        body.fields.get("tools"),
        {**facts.chat_template_kwargs, **kwargs},
    )
