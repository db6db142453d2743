"""Metrics of prompts that came without tokens."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from router.observe.metrics.families import failures, known
from router.request.bodies import WITH_TOKENS
from router.request.proving.proof import State
from router.request.tokens import ESTIMATED, MadeBy, Prompts


class PromptCollector(Collector):
    """Exports, at each scrape, the counters of prompts that came without tokens."""

    def __init__(self, prompts: Prompts, open_prompts: Callable[[], int]) -> None:
        """open_prompts: returns the number of prompts whose tokens are being made."""
        self._prompts = prompts
        self._open_prompts = open_prompts

    @override
    def collect(self) -> Iterator[Metric]:
        prompts = self._prompts
        yield self._made()
        yield self._checks()
        yield self._shapes()
        renders = SummaryMetricFamily(
            "kvroute_prompt_render_seconds",
            "Prompts that child processes rendered, canaries included, and the time that they"
            " took.",
        )
        renders.add_metric([], prompts.renders, prompts.render_s)
        yield renders
        yield known("prompts", self._open_prompts())
        yield known("renders", prompts.waiting)
        yield failures(
            "prompt_child", {(cause, ""): prompts.killed[cause] for cause in ("time", "exit")}
        )

    def _made(self) -> Metric:
        family = CounterMetricFamily(
            "kvroute_prompts",
            "Prompts that came without tokens, by the source of their tokens and their kind;"
            " reason: why only their length was estimated (estimate), else empty.",
            labels=["source", "kind", "reason"],
        )
        for kind in WITH_TOKENS.values():
            for made_by in MadeBy:
                if made_by is not MadeBy.ESTIMATE:
                    family.add_metric([made_by, kind.name, ""], self._prompts.made[made_by, kind])
            for reason in sorted(ESTIMATED):
                count = self._prompts.estimates[reason, kind]
                family.add_metric([MadeBy.ESTIMATE, kind.name, reason], count)
        return family

    def _checks(self) -> Metric:
        prompts = self._prompts
        family = CounterMetricFamily(
            "kvroute_prompt_checks",
            "Checks of prompts' tokens without a good end: the router's own tokens, or their count,"
            " differed from an engine's (different, by model); the router's own were used unproven"
            " (unverified); an engine's answer was no tokens of its prompt, or came too late"
            " (unusable); a comparison after the fact was due and not made (left_out).",
            labels=["result", "model"],
        )
        for model in sorted({*prompts.models, *prompts.differences}):
            family.add_metric(["different", model], prompts.differences[model])
        family.add_metric(["unverified", ""], prompts.unverified)
        family.add_metric(["unusable", ""], prompts.answers_unusable)
        family.add_metric(["left_out", ""], prompts.audits_left_out)
        return family

    def _shapes(self) -> Metric:
        family = GaugeMetricFamily(
            "kvroute_prompt_shapes",
            "Shapes of prompts by how far the router's own tokens are proven for them.",
            labels=["model", "state"],
        )
        counts = Counter((model, trust.state) for model, _, _, trust in self._prompts.proof)
        for model in sorted({*self._prompts.models, *(model for model, _ in counts)}):
            for state in State:
                family.add_metric([model, state], counts[model, state])
        return family
