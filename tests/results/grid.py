"""Policies, traces, rates. *Moved*: picks that the guard moved, of `dynamo-adaptive` and `ttft`."""

from pathlib import Path

from simulator.study.page import picture_file, ttft_over_rates
from tests.results.cases import Case, Done, Results, comparison
from tests.results.fleets import FILES, RATES, Traces, fleet
from tests.results.page import less, markdown_table, ms, percent
from tests.results.pooled import pooled_ttft_ms

SECTION = "grid"
OURS, THEIRS = "ttft", "dynamo-blocks"
DEFAULT, UNGUARDED = "dynamo-adaptive", "dynamo-unguarded"
POLICIES = ("round-robin", "least-loaded", UNGUARDED, DEFAULT, THEIRS, OURS)
_OTHERS = tuple(one for one in POLICIES if one not in (DEFAULT, OURS))
COLUMNS = [
    "rate", "policy", "blocks found", "of the ceiling", "of one LRU cache", "TTFT mean", "p50",
    "p90", "p99", "ITL mean", "end to end", "load, std / mean", "moved", "shed or failed",
]  # fmt: skip


def cases(traces: Traces) -> list[Case]:
    return [
        Case(SECTION, name, traces[name], rate, fleet(policy))
        for name in FILES
        for rate in RATES
        for policy in POLICIES
    ]


def page(traces: Traces, results: Results) -> str:
    parts = []
    for name in FILES:
        rows = [_row(results[SECTION, name, policy, rate]) for rate in RATES for policy in POLICIES]
        slowest = results[SECTION, name, OURS, RATES[0]]
        pooled = ms(pooled_ttft_ms(traces[name].at(1.0, 0), fleet(OURS)))
        parts += [
            f"### {name}\n",
            f"One infinite cache would have {percent(slowest.ceiling.blocks)} of the blocks, one"
            f" LRU cache of the fleet's size {percent(slowest.pooled.blocks)}; with that, and"
            f" nobody ever waiting, the mean TTFT would be {pooled}.\n",
            markdown_table(COLUMNS, rows),
            f"\n![Mean time to first token by rate](results/{name}.svg)",
            "",
        ]
    return "\n".join([_summary(results), _losses(results), *parts])


def draw(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        compared = [
            comparison([results[SECTION, name, policy, rate] for policy in POLICIES])
            for rate in RATES
        ]
        picture = picture_file(ttft_over_rates(compared))
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


def _summary(results: Results) -> str:
    """Ours against Dynamo's formula, both in this simulator."""
    rows = []
    for name in FILES:
        for rate in RATES:
            ours, theirs = (results[SECTION, name, one, rate].numbers for one in (OURS, THEIRS))
            best = min(
                (results[SECTION, name, one, rate] for one in POLICIES),
                key=lambda done: done.numbers.ttft_ms.mean,
            )
            rows.append(
                [
                    name,
                    f"{rate:g}x",
                    less(ours.ttft_ms.mean, theirs.ttft_ms.mean),
                    less(ours.ttft_ms.p99, theirs.ttft_ms.p99),
                    less(ours.itl_ms.mean, theirs.itl_ms.mean),
                    less(ours.e2e_ms.mean, theirs.e2e_ms.mean),
                    best.case.options.policy,
                ]
            )
    head = ["trace", "rate", "TTFT mean", "TTFT p99", "ITL mean", "end to end", "least mean TTFT"]
    told = (
        f"`{OURS}` against `{THEIRS}` with its defaults: how much less (minus) or more it takes.\n"
    )
    return told + "\n" + markdown_table(head, rows) + "\n"


def _losses(results: Results) -> str:
    """Where the default, and ours, take longer than the best of the others to the first token."""
    rows = []
    for name in FILES:
        for rate in RATES:
            ttft_ms = {
                one: results[SECTION, name, one, rate].numbers.ttft_ms.mean for one in POLICIES
            }
            best = min(_OTHERS, key=lambda one: ttft_ms[one])
            rows.append(
                [
                    name,
                    f"{rate:g}x",
                    best,
                    *(less(ttft_ms[one], ttft_ms[best]) for one in (DEFAULT, OURS)),
                    less(ttft_ms[DEFAULT], ttft_ms[UNGUARDED]),
                    percent(results[SECTION, name, DEFAULT, rate].moved_share, 0),
                ]
            )
    head = [
        "trace", "rate", "best of the others", f"`{DEFAULT}`", f"`{OURS}`",
        f"`{DEFAULT}` to `{UNGUARDED}`", "moved",
    ]  # fmt: skip
    told = (
        f"What still loses, in mean TTFT: `{DEFAULT}`, the default, and `{OURS}`, both guarded,"
        f" against the best of {', '.join(f'`{one}`' for one in _OTHERS)}. Plus is a loss.\n"
    )
    return told + "\n" + markdown_table(head, rows) + "\n"


def _row(done: Done) -> list[str]:
    numbers = done.numbers
    return [
        f"{done.case.rate:g}x",
        done.case.options.policy,
        percent(numbers.block_hit_rate),
        *(_share(numbers.block_hit_rate, one.blocks) for one in (done.ceiling, done.pooled)),
        ms(numbers.ttft_ms.mean),
        ms(numbers.ttft_ms.p50),
        ms(numbers.ttft_ms.p90),
        ms(numbers.ttft_ms.p99),
        ms(numbers.itl_ms.mean, 1),
        ms(numbers.e2e_ms.mean),
        f"{numbers.load_cv:.2f}",
        percent(done.moved_share, 0),
        f"{numbers.shed + numbers.failed}",
    ]


def _share(found: float, most: float) -> str:
    return percent(found / most if most else 0.0, 0)
