"""Makes simulator/QUEUE.md: orders of the router's queue at 1.5 times the fleet's capacity.

python -m tests.results.overload [--seconds S] [--seed N] [--jobs N] [--draft]

The numbers are of virtual time, and the same on every machine.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np

from router.config.keys import ConfigError
from router.config.settings.queue_settings import BandSettings, QueueSettings, TenantsSettings
from router.decide.queue_order.orders import ORDERS, Order
from router.decide.waiter import Waiter
from simulator.schedulers.vllm.config import VllmConfig
from simulator.traffic.results import (
    Floats,
    Integers,
    Mask,
    Outcome,
    RunResult,
    Slo,
    is_good,
    share,
)
from simulator.traffic.trace import ID_TOKENS, Trace, TraceRequest
from simulator.world.options import RunOptions
from simulator.world.world import run
from tests.results.page import markdown_table, percent

PAGE = Path(__file__).parents[2] / "simulator" / "QUEUE.md"
BEGIN, END = "<!-- tables: made by `make queue-study` -->", "<!-- end of the tables -->"
SECONDS, OVERLOAD = 600.0, 1.5
CALIBRATION_S, SETTLED_S = 150.0, 40.0
TOO_MUCH_RPS = 40.0
"""Far more than the fleet serves: what comes out then is its capacity."""
WORKERS, SLOTS = 4, 8
TIMEOUT_S = 30.0
TENANTS, GREEDY_SHARE = 8, 0.4
COLD_SHARE = 0.05
"""Requests with a text of their own, from the first token on."""
TURNS_MAX, OPEN_SESSIONS = 6, 100


@dataclass(frozen=True, slots=True)
class Band:
    """What requests of a priority are like."""

    name: str
    priority: int
    share: float
    slo_s: float
    """Of the time to first token."""
    ids: int
    """Of a session's first prompt after the tenant's own two, of 512 tokens each."""
    output_tokens: float
    """Median; the distribution is lognormal with sigma 0.6."""


BANDS = (
    Band("high", 20, 0.2, 2.0, 1, 80.0),
    Band("middle", 10, 0.5, 10.0, 4, 200.0),
    Band("low", 0, 0.3, 30.0, 10, 400.0),
)


@dataclass(slots=True)
class _Session:
    """A conversation: each prompt begins with the one before it."""

    tenant: int
    band: Band
    ids: list[int]
    turns: int


def traffic(rps: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals of sessions' turns, and of cold requests."""
    rng = Random(f"{seed}/overload")
    sessions: list[_Session] = []
    requests: list[TraceRequest] = []
    now_s, text = 2.0, 1 << 20
    while (now_s := now_s + rng.expovariate(rps)) < 2.0 + seconds:
        cold = rng.random() < COLD_SHARE
        if cold or len(sessions) < OPEN_SESSIONS or rng.random() < 0.3:
            greedy = rng.random() < GREEDY_SHARE
            tenant = 0 if greedy else rng.randrange(1, TENANTS)
            band = rng.choices(BANDS, [band.share for band in BANDS])[0]
            begin = [] if cold else [2 * tenant, 2 * tenant + 1]
            session = _Session(tenant, band, begin, 1 if cold else rng.randint(1, TURNS_MAX))
            more = band.ids + (2 if cold else 0)
        else:
            session, more = sessions.pop(rng.randrange(len(sessions))), 1
        session.ids = session.ids + list(range(text, text + more))
        text += more
        session.turns -= 1
        if session.turns:
            sessions.append(session)
        band = session.band
        requests.append(
            TraceRequest(
                now_s,
                ID_TOKENS * len(session.ids) - rng.randrange(ID_TOKENS // 2),
                max(4, min(2000, round(rng.lognormvariate(np.log(band.output_tokens), 0.6)))),
                np.array(session.ids, np.uint64),
                priority=band.priority,
                tenant=f"tenant-{session.tenant + 1}",
                ttft_slo_s=band.slo_s,
            )
        )
    return Trace("overload", requests)


def fleet(queue: QueueSettings, seed: int) -> RunOptions:
    """Four engines with eight slots each; a client that is refused does not come back."""
    scheduler = VllmConfig(
        block_count=2048, block_size=64, max_num_seqs=SLOTS, joined_steps_max=10_000
    )
    return RunOptions(
        workers=WORKERS,
        scheduler=scheduler,
        queue=queue,
        seed=seed,
        patience_s=0.0,
        output_hint=True,
    )


# --- Dynamo's queue policies ---


def _dynamo_weight(waiter: Waiter) -> float:
    return 1.0 + max(0, waiter.points)


DYNAMO_FCFS = Order("dynamo-fcfs", lambda waiter, _: float(max(0, waiter.points)), aging=1.0)
"""A priority is seconds by which a request is taken to have come earlier, 0 at least. Source:
NVIDIA Dynamo 1.6, queue policy fcfs: priority_jump - arrival."""
DYNAMO_WSPT = Order(
    "dynamo-wspt",
    lambda waiter, _: _dynamo_weight(waiter) / max(1, waiter.new_tokens),
    aging=0.0,
)
"""Source: NVIDIA Dynamo 1.6, queue policy wspt: (1 + priority_jump) / max(uncached tokens, 1)."""
DYNAMO = {order.name: order for order in (DYNAMO_FCFS, DYNAMO_WSPT)}


# --- the runs ---

_THREE = tuple(BandSettings(band.name, band.priority, weight) for band, weight in
               zip(BANDS, (4.0, 2.0, 1.0), strict=True))  # fmt: skip
_FAIR = TenantsSettings(fair=True)


def _queue(order: str, **more: object) -> QueueSettings:
    return QueueSettings(order=order, timeout_s=TIMEOUT_S, **more)  # type: ignore[arg-type]


NAMES = (
    *("fcfs", "priority", "lpm", "dfs-weight", "lof", "shortest-first", "edf", "wspt", "las"),
    "random",
)
SETUPS: dict[str, QueueSettings] = {name: _queue(name) for name in NAMES} | {
    "priority, aging 1": _queue("priority", aging=1.0),
    "priority, aging 0": _queue("priority", aging=0.0),
    "wspt, aging 0": _queue("wspt", aging=0.0),
    "wspt, bands 4:2:1": _queue("wspt", bands=_THREE),
    "fcfs, bands 4:2:1, no aging": _queue("fcfs", bands=_THREE, bands_aging=0.0),
    "edf, bands strict": _queue("edf", bands=_THREE, bands_strict=True),
    "priority, fair tenants": _queue("priority", tenants=_FAIR),
    "wspt, bands 4:2:1, fair tenants": _queue("wspt", bands=_THREE, tenants=_FAIR),
    "wspt, bands 4:2:1, fair tenants, no aging": _queue(
        "wspt", aging=0.0, bands=_THREE, bands_aging=0.0, tenants=_FAIR
    ),
    "Dynamo fcfs": _queue(DYNAMO_FCFS.name),
    "Dynamo wspt": _queue(DYNAMO_WSPT.name),
}


@dataclass(frozen=True, slots=True)
class Played:
    """One setup's run."""

    trace: Trace
    result: RunResult

    @property
    def wait_s(self) -> Floats:
        """To the pick, or to the end of a wait without one."""
        served = self.result.outcome == Outcome.SERVED
        return np.where(served, self.result.wait_s, TIMEOUT_S)

    @property
    def tokens(self) -> Integers:
        """Computed for each request: its prompt beyond the cache, and its answer."""
        new = self.result.prompt_tokens - self.result.cached_tokens + self.result.output_tokens
        return np.where(self.result.outcome == Outcome.SERVED, new, 0)

    def of_band(self, band: Band) -> Mask:
        """Which requests have its priority."""
        return np.array([one.priority == band.priority for one in self.trace.requests])

    def of_tenant(self, number: int) -> Mask:
        """Which requests are a tenant's; the greedy one is number 1."""
        return np.array([one.tenant == f"tenant-{number}" for one in self.trace.requests])


def capacity_rps(seed: int) -> float:
    """Requests a second that the fleet serves when far more of this traffic come."""
    trace = traffic(TOO_MUCH_RPS, CALIBRATION_S, seed)
    result = run(fleet(_queue("fcfs"), seed), trace)
    ends_s = (result.arrival_s + result.e2e_s)[result.outcome == Outcome.SERVED]
    settled = (ends_s > SETTLED_S) & (ends_s <= CALIBRATION_S)
    return int(settled.sum()) / (CALIBRATION_S - SETTLED_S)


def play(name: str, rps: float, seconds: float, seed: int) -> Played | None:
    """One run; None for an order that the simulator's router refuses."""
    trace = traffic(rps, seconds, seed)
    ORDERS.update(DYNAMO)  # for this run only: the product has no such orders
    try:
        return Played(trace, run(fleet(SETUPS[name], seed), trace))
    except ConfigError:
        return None
    finally:
        for theirs in DYNAMO:
            del ORDERS[theirs]


def play_all(
    names: Sequence[str], rps: float, seconds: float, seed: int, jobs: int
) -> dict[str, Played | None]:
    """All of them, in so many processes."""
    arguments = ([rps] * len(names), [seconds] * len(names), [seed] * len(names))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(zip(names, pool.map(play, names, *arguments), strict=True))


# --- the page ---


def _seconds(values: Floats, percentile: float) -> str:
    return f"{float(np.percentile(values, percentile)):.1f}" if len(values) else "-"


def bands_table(runs: dict[str, Played], seconds: float) -> str:
    """Waits, goodput and tokens of each order, by band."""
    head = ["order", "served", "good", "good /s"]
    for band in BANDS:
        head += [f"{band.name}: wait p50", "p99", "good", "tokens"]
    rows = []
    for name, one in runs.items():
        good = is_good(one.result, Slo())
        served = one.result.outcome == Outcome.SERVED
        row = [name, percent(served.mean()), percent(good.mean()), f"{good.sum() / seconds:.2f}"]
        for band in BANDS:
            of_band = one.of_band(band)
            row += [
                _seconds(one.wait_s[of_band], 50),
                _seconds(one.wait_s[of_band], 99),
                percent(good[of_band].mean()),
                percent(share(one.tokens[of_band], one.tokens)),
            ]
        rows.append(row)
    return markdown_table(head, rows)


def tenants_table(runs: dict[str, Played]) -> str:
    """The greedy tenant beside the others."""
    head = ["order", "greedy: wait p50", "p99", "good", "tokens"]
    head += ["others: wait p50", "p99", "good", "tokens, least", "most"]
    rows = []
    for name, one in runs.items():
        good, greedy = is_good(one.result, Slo()), one.of_tenant(1)
        shares = [share(one.tokens[one.of_tenant(i)], one.tokens) for i in range(2, TENANTS + 1)]
        row = [name]
        for some in (greedy, ~greedy):
            row += [_seconds(one.wait_s[some], 50), _seconds(one.wait_s[some], 99)]
            row += [percent(good[some].mean())]
            if some is greedy:
                row += [percent(share(one.tokens[some], one.tokens))]
        rows.append([*row, percent(min(shares)), percent(max(shares))])
    return markdown_table(head, rows)


def tables(runs: dict[str, Played | None], rps: float, seconds: float, seed: int) -> str:
    """What the command writes into the page."""
    played = {name: one for name, one in runs.items() if one is not None}
    left_out = [name for name, one in runs.items() if one is None]
    lines = [
        f"The fleet serves {rps / OVERLOAD:.2f} requests a second of this traffic; {rps:.2f} a"
        f" second come for {seconds:g} s. Seed {seed}.",
        "",
        "By band, waits in seconds:",
        "",
        bands_table(played, seconds),
        "",
        "By tenant:",
        "",
        tenants_table(played),
        "",
    ]
    if left_out:
        lines += [
            f"Not played, since the simulator's router refused them: {', '.join(left_out)}.",
            "",
        ]
    return "\n".join(lines)


def written(page: str, made: str) -> str:
    """The page with these tables between its marks; raises ValueError without them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{made}\n{END}{tail}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.results.overload")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the runs")
    parser.add_argument("--draft", action="store_true", help="print the tables, write nothing")
    given = parser.parse_args(arguments)
    rps = OVERLOAD * capacity_rps(given.seed)
    runs = play_all(list(SETUPS), rps, given.seconds, given.seed, given.jobs)
    made = tables(runs, rps, given.seconds, given.seed)
    if given.draft:
        sys.stdout.write(made)
    else:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
