"""Reads a tokenizer's folder as a model's release has it: tokenizer, chat templates, special
tokens."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.request.prompt_error import PromptError
from router.request.refusal import Reason

FILE_BYTES_MAX = 256 << 20
DIGEST_DIGITS = 16
SPECIALS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)
"""Special tokens that engines give a template by name."""


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The contents of a folder that decide a prompt's tokens."""

    path: Path
    tokenizer: bytes
    """tokenizer.json"""
    templates: dict[str, str]
    """Chat templates by name; `default` is the usual name of the only one."""
    specials: dict[str, str]
    """Texts of special tokens such as bos_token, by name."""
    added_tokens: tuple[dict[str, Any], ...] = field(default=())
    """Added tokens of tokenizer_config.json, in order of their ids; most are in tokenizer.json,
    too."""

    @property
    def digest(self) -> str:
        """Digest that is equal for two folders which give the same tokens."""
        rest = [self.templates, self.specials, self.added_tokens]
        hashed = hashlib.sha256(hashlib.sha256(self.tokenizer).digest())
        hashed.update(json.dumps(rest, sort_keys=True).encode())
        return hashed.hexdigest()[:DIGEST_DIGITS]


def read_folder(path: Path) -> TokenizerFolder:
    """Reads the folder's files. Raises PromptError (NO_TOKENIZER), which names the file that can't
    be used."""
    tokenizer = _read(path / "tokenizer.json")
    if tokenizer is None:
        raise no_tokenizer(f"{path} holds no tokenizer.json")
    config = _object(path / "tokenizer_config.json")
    named = config | _object(path / "special_tokens_map.json") | config
    return TokenizerFolder(
        path,
        tokenizer,
        _templates(path, config),
        {name: _content(named[name]) for name in SPECIALS if named.get(name)},
        _added_tokens(config),
    )


def no_tokenizer(message: str) -> PromptError:
    """The error (NO_TOKENIZER) for a model without a usable tokenizer, which the operator has to
    mend."""
    return PromptError(Reason.NO_TOKENIZER, message)


def read_text(path: Path) -> str | None:
    """The file's text; None: there is no such file."""
    data = _read(path)
    try:
        return None if data is None else str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise no_tokenizer(f"{path} is not UTF-8: {error.reason}") from error


def _read(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise no_tokenizer(f"{path} has more than {FILE_BYTES_MAX} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise no_tokenizer(f"{path} can't be read: {error.strerror}") from error


def _object(path: Path) -> dict[str, Any]:
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise no_tokenizer(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise no_tokenizer(f"{path} holds no JSON object")
    return value


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, as transformers ranks them: files win over tokenizer_config.json."""
    files = {
        file.stem: read_text(file) or ""
        for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
    }
    default = read_text(path / "chat_template.jinja")
    if default is not None:
        files["default"] = default
    if files:
        return files
    listed = config.get("chat_template") or _object(path / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(listed, list):
        return {
            str(entry["name"]): str(entry["template"])
            for entry in listed
            if isinstance(entry, dict) and "name" in entry and "template" in entry
        }
    if isinstance(listed, dict):
        return {str(name): str(template) for name, template in listed.items()}
    return {"default": listed} if isinstance(listed, str) else {}


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _added_tokens(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return ()
    try:
        tokens = {int(number): token for number, token in listed.items() if isinstance(token, dict)}
    except ValueError as error:
        raise no_tokenizer(f"an id of added_tokens_decoder is no number: {error}") from error
    return tuple({"id": number, **token} for number, token in sorted(tokens.items()))
