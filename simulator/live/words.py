"""Answers that a person can read, for stand-in engines whose tokens are bytes. Pure.

As greedy answers do, they depend on the prompt and the LoRA only. A client that sends such an
answer back as part of a chat sends the tokens that the engine made, so that the next turn finds
them in its cache.
"""

import numpy as np
from xxhash import xxh3_64_intdigest

from simulator.engines.scheduler import TokenArray

_WORDS = (
    "a", "again", "all", "and", "answer", "are", "as", "at", "block", "by", "cache", "each",
    "engine", "every", "fleet", "for", "from", "has", "in", "is", "it", "less", "load", "more",
    "next", "no", "of", "on", "one", "picks", "prefix", "prompt", "reuses", "router", "same",
    "sends", "so", "that", "the", "then", "there", "time", "to", "token", "two", "waits", "where",
    "which", "with", "worker",
)  # fmt: skip
_SENTENCE = 9
"""Words of a sentence."""
_LETTERS = 4
"""Lower bound of a word's mean bytes with its space; twice the words that it makes necessary are
drawn."""


def words_answer(prompt: TokenArray, max_tokens: int, lora_name: str) -> TokenArray:
    """An Answer (simulator.engines.content): sentences of random words in ASCII, a byte a token,
    cut off at max_tokens."""
    key = xxh3_64_intdigest(prompt.tobytes() + lora_name.encode())
    count = max_tokens * 2 // _LETTERS + _SENTENCE
    drawn = np.random.Philox(key=key).random_raw(count) % np.uint64(len(_WORDS))
    words = [_WORDS[number] for number in drawn.tolist()]
    sentences = [
        " ".join(words[at : at + _SENTENCE]).capitalize() + "." for at in range(0, count, _SENTENCE)
    ]
    text = "I am a stand-in. " + " ".join(sentences)
    return np.frombuffer(text.encode()[:max_tokens], np.uint8).astype(np.uint32)
