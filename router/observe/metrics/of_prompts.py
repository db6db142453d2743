"""Metrics of prompts that came without tokens."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.observe.metrics.families import counter, gauge
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
        yield CounterMetricFamily(
            "kvroute_prompts_unverified",
            "Prompts with the router's own tokens that no engine gave, and of a shape that was not"
            " proven.",
            value=prompts.unverified,
        )
        yield counter(
            "kvroute_prompt_estimates",
            "Prompts without tokens whose length was estimated, by reason.",
            "reason",
            dict(prompts.estimates),
            tuple(sorted(ESTIMATED)),
        )
        yield self._differences()
        yield self._shapes()
        yield CounterMetricFamily(
            "kvroute_prompt_render_seconds",
            "Time that child processes took to render prompts, in seconds.",
            value=prompts.render_s,
        )
        yield CounterMetricFamily(
            "kvroute_prompt_renders",
            "Prompts that child processes rendered, canaries included.",
            value=prompts.renders,
        )
        yield gauge(
            "kvroute_prompt_renders_waiting",
            "Prompts that child processes render, or that wait for one.",
            prompts.waiting,
        )
        yield gauge(
            "kvroute_prompts_open",
            "Requests whose prompt has its tokens made, by a child process or by an engine.",
            self._open_prompts(),
        )
        yield CounterMetricFamily(
            "kvroute_prompt_answers_unusable",
            "Answers of engines that were no tokens of their prompt, or came too late.",
            value=prompts.answers_unusable,
        )
        yield counter(
            "kvroute_prompt_children_killed",
            "Child processes that were killed since a render took too long, or that ended.",
            "cause",
            dict(prompts.killed),
            ("time", "exit"),
        )
        yield CounterMetricFamily(
            "kvroute_prompt_audits_left_out",
            "Comparisons after the fact that were due and not made: too many at once, or the engine"
            " gave no tokens.",
            value=prompts.audits_left_out,
        )

    def _made(self) -> Metric:
        family = CounterMetricFamily(
            "kvroute_prompts",
            "Prompts that came without tokens, by the source of their tokens and their kind.",
            labels=["source", "kind"],
        )
        for made_by in MadeBy:
            for kind in WITH_TOKENS.values():
                family.add_metric([made_by, kind.name], self._prompts.made[made_by, kind])
        return family

    def _differences(self) -> Metric:
        family = CounterMetricFamily(
            "kvroute_prompt_differences",
            "Prompts whose tokens, or their count, differed between the router and an engine.",
            labels=["model"],
        )
        for model in sorted({*self._prompts.models, *self._prompts.differences}):
            family.add_metric([model], self._prompts.differences[model])
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
