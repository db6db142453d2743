"""The folder of the stand-in engines' toy tokenizer: a token a UTF-8 byte, and their chat template.

The same tokens as simulator/live/completion_wire.py makes of a prompt, and of a chat of texts,
also in parts and of a developer.
"""

import json
from pathlib import Path

_TEMPLATE = (
    # The comment says that the role is the template's own, so that it stays one, as in the engine.
    '{# "developer" #}'
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\\n' }}{% endif %}"
)
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that byte-level tokenizers write as the character of their own number."""


def make_folder(folder: Path) -> Path:
    """Writes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level |= {"use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": _vocabulary(), "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _vocabulary() -> dict[str, int]:
    """Character -> byte; the others are written as the characters from 256 on."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    printable = {chr(byte): byte for byte in _PRINTABLE}
    return printable | {chr(256 + place): byte for place, byte in enumerate(others)}
