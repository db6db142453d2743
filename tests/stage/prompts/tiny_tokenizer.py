"""A tokenizer's folder for tests, generated: byte-level, ChatML's specials, 500 merges of English.

Fits the tiny model of tests/real_engines (1,024 ids), so that real engines run with it, too.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXT = (
    "You are a helpful assistant. The user asked what the weather in Paris would be tomorrow, and "
    "which tools may be called with which arguments. Think before you answer, then answer. "
    '{"type": "function", "function": {"name": "get_weather", "description": "Get the weather", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}} system user '
    "assistant developer tool_call tool_response arguments name content reasoning effort null\n\n"
)
"""Text of ours; merges are learned from it."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special."""
VOCABULARY = 800
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen 2's: transformers 5 puts it into the tokenizer of any model of that type, as the tiny model
is, whatever tokenizer.json says."""


def make_folder(folder: Path, template: str | dict[str, str] | None, **config: Any) -> Path:
    """Writes the folder; config: more of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        **config,
    }
    if isinstance(template, dict):
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in template.items()
        ]
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def make_tokenizer() -> Tokenizer:
    """The same at each call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in WORDS])
    return tokenizer
