"""Metrics of prompts that came without tokens."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric, SummaryMetricFamily

from router.observe.metrics.families import counters, failures, gauges, known
from router.request.bodies import WITH_TOKENS
from router.request.proving.proof import State
from router.request.tokens import ESTIMATED, MadeBy, Prompts


def prompt_metrics(prompts: Prompts, open_prompts: Callable[[], int]) -> Iterator[Metric]:
    """Counters of prompts that came without tokens. open_prompts: returns the number of those whose
    tokens are being made."""
    yield _made(prompts)
    yield _checks(prompts)
    yield _shapes(prompts)
    renders = SummaryMetricFamily(
        "kvroute_prompt_render_seconds",
        "Prompts that child processes rendered, canaries included, and the time that they took.",
    )
    renders.add_metric([], prompts.renders, prompts.render_s)
    yield renders
    yield known("prompts", open_prompts())
    yield known("renders", prompts.waiting)
    yield failures(
        "prompt_child", {(cause, ""): prompts.killed[cause] for cause in ("time", "exit")}
    )


def _made(prompts: Prompts) -> Metric:
    made = {
        (source, kind.name, ""): prompts.made[source, kind]
        for kind in WITH_TOKENS.values()
        for source in MadeBy
        if source is not MadeBy.ESTIMATE
    }
    estimated = {
        (MadeBy.ESTIMATE, kind.name, reason): prompts.estimates[reason, kind]
        for kind in WITH_TOKENS.values()
        for reason in sorted(ESTIMATED)
    }
    return counters(
        "kvroute_prompts",
        "Prompts that came without tokens, by the source of their tokens and their kind;"
        " reason: why only their length was estimated (estimate), else empty.",
        ["source", "kind", "reason"],
        {**made, **estimated},
    )


def _checks(prompts: Prompts) -> Metric:
    models = sorted({*prompts.models, *prompts.differences})
    return counters(
        "kvroute_prompt_checks",
        "Checks of prompts' tokens that ended without agreement: the router's own tokens, or their"
        " count, differed from an engine's (different, by model); the router's own were used"
        " unproven (unverified); an engine's answer had no tokens of its prompt, or came too late"
        " (unusable); a comparison after the request was due and not made (left_out).",
        ["result", "model"],
        {
            **{("different", model): prompts.differences[model] for model in models},
            ("unverified", ""): prompts.unverified,
            ("unusable", ""): prompts.answers_unusable,
            ("left_out", ""): prompts.audits_left_out,
        },
    )


def _shapes(prompts: Prompts) -> Metric:
    counts = Counter((model, trust.state) for model, _, _, trust in prompts.proof)
    models = sorted({*prompts.models, *(model for model, _ in counts)})
    return gauges(
        "kvroute_prompt_shapes",
        "Shapes of prompts by how far the router's own tokens are proven for them.",
        ["model", "state"],
        {(model, state): counts[model, state] for model in models for state in State},
    )
