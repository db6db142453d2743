"""Answers that a person can read."""

import numpy as np
import pytest

from simulator.live.completion_wire import detokenize, tokenize
from simulator.live.words import words_answer


def answer(prompt: str, tokens: int, lora_name: str = "") -> list[int]:
    ids = np.array(tokenize(prompt), np.uint32)
    return words_answer(ids, tokens, lora_name).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tokens", [0, 1, 16, 256, 10_000])
def test_an_answer_has_as_many_tokens_as_it_may_and_its_text_gives_them_back(tokens: int) -> None:
    ids = answer("a prompt", tokens)
    assert len(ids) == tokens
    assert tokenize(detokenize(ids)) == ids


def test_answers_depend_on_the_prompt_and_the_lora_alone() -> None:
    assert answer("a prompt", 256) == answer("a prompt", 256)
    assert answer("a prompt", 256)[:100] == answer("a prompt", 100)
    others = {tuple(answer(*about)) for about in (("a prompt", 99), ("another", 99))}
    assert len(others | {tuple(answer("a prompt", 99, "a lora"))}) == 3
