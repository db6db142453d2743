"""The body of an engine's /tokenize for a completion, and what its chats share. Pure."""

import msgspec


class Unsupported(ValueError):
    """An engine's /tokenize gives other tokens for this body than the engine computes."""


class _Completion(msgspec.Struct):
    prompt: msgspec.Raw
    model: msgspec.Raw = msgspec.Raw()
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()


def tokenize_completion(content: bytes) -> bytes:
    """The body of /tokenize for a completion. Raises Unsupported, msgspec.DecodeError."""
    body = msgspec.json.decode(content, type=_Completion)
    if not bytes(body.prompt).lstrip().startswith(b'"'):
        raise Unsupported("/tokenize takes one text, and the body's prompt is none")
    if is_set(body.truncate_prompt_tokens):
        raise Unsupported("/tokenize ignores truncate_prompt_tokens")
    fields = ("prompt", "model", "add_special_tokens")
    return json_object({name: getattr(body, name) for name in fields})


def json_object(fields: dict[str, msgspec.Raw]) -> bytes:
    """A JSON object of the fields that have a value; absent ones and null are left out."""
    return msgspec.json.encode({name: value for name, value in fields.items() if is_set(value)})


def is_set(value: msgspec.Raw) -> bool:
    """Whether a field is there, and not null."""
    return bytes(value) not in (b"", b"null")
