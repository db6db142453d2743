"""The expected length of an answer, by the answers before it."""

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.output_lengths import MODELS_MAX, PRIOR_TOKENS, OutputLengths


def test_a_model_without_answers_has_the_prior_and_many_answers_replace_it() -> None:
    lengths = OutputLengths()
    assert lengths.mean("m") == PRIOR_TOKENS
    for _ in range(500):
        lengths.add("m", 40)
    assert 40 <= lengths.mean("m") < 50
    for _ in range(500):
        lengths.add("m", 4000)
    assert 3500 < lengths.mean("m") <= 4000


@given(st.lists(st.integers(0, 1 << 20), max_size=50))
def test_the_mean_lies_within_what_was_seen_and_the_prior(tokens: list[int]) -> None:
    lengths = OutputLengths()
    for count in tokens:
        lengths.add("m", count)
    assert max(1, min([PRIOR_TOKENS, *tokens])) <= lengths.mean("m")
    assert lengths.mean("m") <= max([PRIOR_TOKENS, *tokens])


def test_so_many_models_are_remembered_and_the_one_used_last_stays() -> None:
    lengths = OutputLengths()
    lengths.add("first", 1)
    for number in range(MODELS_MAX):
        lengths.add(f"m{number}", 1)
    assert len(lengths) == MODELS_MAX
    assert lengths.mean("first") == PRIOR_TOKENS
    assert lengths.mean(f"m{MODELS_MAX - 1}") < PRIOR_TOKENS
