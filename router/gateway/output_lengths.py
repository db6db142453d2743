"""Expected length of a model's next answer, from the lengths of earlier ones. Pure.

A request's `max_tokens` is a bound, which programs set high: an agent's is 32,000 tokens where its
answers have 300. As an expectation it would have routers hold requests back for KV cache that no
answer takes. So the expectation is the mean of the model's answers, or `max_tokens` if that is
less.

    mean = (PRIOR_TOKENS * PRIOR_ANSWERS + sum of tokens) / (PRIOR_ANSWERS + answers)

in which each further answer makes those before it count FADES times as much.
"""

from collections import OrderedDict

PRIOR_TOKENS = 256
"""Tokens of an answer of a model of which nothing is known."""
PRIOR_ANSWERS = 4
FADES = 0.99
"""So that the last hundred answers count for about two thirds."""
MODELS_MAX = 256
"""Models of which answers are remembered; the one without an answer for longest goes first."""


class OutputLengths:
    """Lengths in tokens of the answers that one gateway has passed on, by model."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Model -> faded sum of tokens, faded number of answers."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, model: str, tokens: int) -> None:
        """Counts an answer of `tokens` tokens that was passed on whole."""
        total, answers = self._seen.pop(model, (0.0, 0.0))
        self._seen[model] = (FADES * total + tokens, FADES * answers + 1)
        if len(self._seen) > MODELS_MAX:
            self._seen.popitem(last=False)

    def mean(self, model: str) -> int:
        """Expected tokens of the model's next answer, at least 1."""
        total, answers = self._seen.get(model, (0.0, 0.0))
        mean = (PRIOR_TOKENS * PRIOR_ANSWERS + total) / (PRIOR_ANSWERS + answers)
        return max(1, round(mean))
