"""Each preset beside the others, on each trace, with the numbers that it is for.

Presets that come to the same settings share a row. *To balanced*: how much less (minus) or more
than the default. *Moved*: picks that the guard moved.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from router.config.reading import load
from router.config.settings.configurations import ServeConfig
from router.config.settings.presets import PRESETS, PresetName
from router.config.settings.routing_settings import RoutingSettings
from simulator.world.options import RunOptions
from tests.results.cases import Case, Done, Results
from tests.results.fleets import FILES, RATES, Traces, fleet
from tests.results.page import less, markdown_table, ms, percent

SECTION = "presets"
BALANCED: PresetName = "balanced"


class Aim(NamedTuple):
    """A number that a preset is for."""

    name: str
    of: Callable[[Done], float]
    """The number of a run."""
    shown: Callable[[float], str]
    trace: str
    rates: tuple[float, ...]


def _ttft_mean(done: Done) -> float:
    return done.numbers.ttft_ms.mean


def _itl_mean(done: Done) -> float:
    return done.numbers.itl_ms.mean


def _e2e_mean(done: Done) -> float:
    return done.numbers.e2e_ms.mean


def _tokens(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} /s"


AIMS: dict[PresetName, tuple[Aim, ...]] = {
    "chat": (
        Aim("TTFT mean", _ttft_mean, ms, "conversation", RATES),
        Aim("ITL mean", _itl_mean, lambda value: ms(value, 1), "conversation", RATES),
    ),
    "batch": (
        Aim("end to end", _e2e_mean, ms, "conversation", (RATES[-1],)),
        Aim("end to end", _e2e_mean, ms, "synthetic", (RATES[-1],)),
    ),
}


def preset_fleet(name: PresetName) -> RunOptions:
    """The fleet of the other sections, decided for by a preset."""
    routing = load(ServeConfig, None, {}, {("routing", "preset"): name}).routing
    plain = RoutingSettings()
    # The policy is the run's; so presets of the same settings are the same run.
    settings = msgspec.structs.replace(routing, preset=plain.preset, policy=plain.policy)
    options = replace(fleet(routing.policy), routing=settings)
    return replace(options, hot_prefixes=routing.hot_prefixes.enabled)


def groups() -> dict[str, list[PresetName]]:
    """Presets with the same settings, by those settings; balanced first."""
    found: dict[str, list[PresetName]] = {}
    for name in PRESETS:
        found.setdefault(repr(preset_fleet(name)), []).append(name)
    return found


def cases(traces: Traces) -> list[Case]:
    return [
        Case(SECTION, f"{trace}, {names[0]}", traces[trace], rate, preset_fleet(names[0]))
        for trace in FILES
        for rate in RATES
        for names in groups().values()
    ]


def page(traces: Traces, results: Results) -> str:
    runs = {key[1::2]: done for key, done in results.items() if key[0] == SECTION}
    """(trace and first of the presets, rate) -> run"""
    first = {name: names[0] for names in groups().values() for name in names}

    def run(trace: str, preset: PresetName, rate: float) -> Done:
        return runs[f"{trace}, {first[preset]}", rate]

    parts = [_aims(run), ""]
    for trace in FILES:
        rows = [
            _row(", ".join(names), run(trace, names[0], rate), run(trace, BALANCED, rate))
            for rate in RATES
            for names in groups().values()
        ]
        parts += [f"### Presets: {trace}\n", markdown_table(_HEAD, rows), ""]
    return "\n".join(parts)


def _aims(run: Callable[[str, PresetName, float], Done]) -> str:
    """What each preset is for, and which preset does best at it."""
    rows = []
    for preset, aim, rate in _aimed():
        value = {name: aim.of(run(aim.trace, name, rate)) for name in PRESETS}
        best_value = min(value.values())
        best = [name for name in PRESETS if value[name] == best_value]
        rows.append(
            [
                preset,
                f"{aim.name}, {aim.trace} at {rate:g}x",
                aim.shown(value[preset]),
                aim.shown(value[BALANCED]),
                less(value[preset], value[BALANCED]),
                ", ".join(best),
            ]
        )
    head = ["preset", "for", "its own", "balanced", "to balanced", "best"]
    return markdown_table(head, rows)


def _aimed() -> Iterator[tuple[PresetName, Aim, float]]:
    for preset, aims in AIMS.items():
        for aim in aims:
            for rate in aim.rates:
                yield preset, aim, rate


_HEAD = [
    "rate", "presets", "policy", "TTFT mean", "to balanced", "p99", "to balanced", "ITL mean",
    "end to end", "tokens", "blocks found", "moved",
]  # fmt: skip


def _row(names: str, done: Done, balanced: Done) -> list[str]:
    numbers, usual = done.numbers, balanced.numbers
    return [
        f"{done.case.rate:g}x",
        names,
        done.case.options.policy,
        ms(numbers.ttft_ms.mean),
        less(numbers.ttft_ms.mean, usual.ttft_ms.mean),
        ms(numbers.ttft_ms.p99),
        less(numbers.ttft_ms.p99, usual.ttft_ms.p99),
        ms(numbers.itl_ms.mean, 1),
        ms(numbers.e2e_ms.mean),
        _tokens(done.tokens_per_s),
        percent(numbers.block_hit_rate),
        percent(done.moved_share, 0),
    ]
