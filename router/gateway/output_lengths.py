"""Expected length of a model's next answer, from the lengths of earlier ones. Pure.

A request's `max_tokens` is a bound, which programs set high: an agent's is 32,000 tokens where its
answers have 300. As an expectation it would have routers hold requests back for KV cache that no
answer takes. So the expectation is the mean of the model's answers, or `max_tokens` if that is
less.

    mean = (PRIOR_TOKENS * PRIOR_ANSWERS + sum of tokens) / (PRIOR_ANSWERS + answers)

over a model's earlier answers, whose weight each further answer multiplies by FADES.
"""

from collections import OrderedDict

PRIOR_TOKENS = 256
"""Expected tokens of an answer of a model that has given none."""
PRIOR_ANSWERS = 4
"""Number of answers as which PRIOR_TOKENS counts in the mean."""
FADES = 0.99
"""Factor on earlier answers' weight at each answer; the last 100 have two thirds of all weight."""
MODELS_MAX = 256
"""Most models whose answers are remembered; the model with the oldest last answer is forgotten."""


class OutputLengths:
    """Lengths in tokens of the answers that one gateway has passed on, by model."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Model -> faded sum of tokens, faded number of answers."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, model: str, tokens: int) -> None:
        """Counts an answer of a model that was passed on whole, with its number of tokens."""
        total, answers = self._seen.pop(model, (0.0, 0.0))
        self._seen[model] = (FADES * total + tokens, FADES * answers + 1)
        if len(self._seen) > MODELS_MAX:
            self._seen.popitem(last=False)

    def mean(self, model: str) -> int:
        """Expected tokens of the model's next answer, at least 1."""
        total, answers = self._seen.get(model, (0.0, 0.0))
        mean = (PRIOR_TOKENS * PRIOR_ANSWERS + total) / (PRIOR_ANSWERS + answers)
        return max(1, round(mean))
