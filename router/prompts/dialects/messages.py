"""Checks that every dialect makes of a chat's messages. Pure."""

from typing import Any

from router.prompts.prompt_error import malformed, type_name


def checked_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The body's messages: at least one, each an object with a role. Raises PromptError."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise malformed(f"messages is {type_name(messages)}, not an array")
    if not messages:
        raise malformed("messages is an empty array")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise malformed(f"messages[{place}] is {type_name(message)}, not an object")
        if not isinstance(message.get("role"), str):
            raise malformed(f"messages[{place}] has no role")
    return messages
