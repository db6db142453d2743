"""Metrics of each worker, read from the core at each scrape."""

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from events.engines.numbers import GAUGES, NUMBERS
from events.feed.fleet_view import Source
from events.feed.stream import StreamState
from router.decide.core.core import RouterCore
from router.fleet.reservations.reservations import Ending
from router.fleet.state import Fleet
from router.observe.metrics.families import gauge

LABELS = ("worker", "rank", "role")
_OUTCOMES = (Ending.FINISHED, Ending.FAILED_WORKER, Ending.FAILED_TIMEOUT, Ending.FAILED_REFUSED)
"""Outcomes that are exported for each worker from 0 on."""
_COUNTERS = {name: each for name, each in NUMBERS.items() if each.is_counter and each.is_metric}
_NUMBERS = "Numbers of the engine's metrics page: those of engines.numbers, and " + " ".join(
    f"{name}: {NUMBERS[name].meaning}" for name in GAUGES
)


def worker_metrics(core: RouterCore) -> Iterator[Metric]:
    """Load, capacity and outcomes of every worker."""
    fleet = core.fleet
    yield from _loads(fleet)
    yield from _capacities(fleet)
    yield from _numbers(fleet)
    yield _outcomes(fleet)
    yield from _reports(fleet)
    yield from _streams(fleet)


def _streams(fleet: Fleet) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "kvroute_stream_state",
        "1 for the state that a worker's stream is in, 0 for the others.",
        labels=[*LABELS, "state"],
    )
    complete = GaugeMetricFamily(
        "kvroute_stream_complete",
        "0 if a worker's stream may lack blocks that its engine holds, else 1.",
        labels=LABELS,
    )
    lag = GaugeMetricFamily(
        "kvroute_stream_lag_seconds",
        "Age of a worker's last fact when the router applied it.",
        labels=LABELS,
    )
    for source in fleet.view.sources.values():
        names = _names(source)
        for each in StreamState:
            state.add_metric([*names, each.value], source.stream.state is each)
        complete.add_metric(names, source.stream.whole)
        lag.add_metric(names, source.stream.lag_s)
    yield from (state, complete, lag)


def _loads(fleet: Fleet) -> Iterator[Metric]:
    up = _gauges("up", "1 if the worker may get requests, else 0.")
    blocks = GaugeMetricFamily(
        "kvroute_worker_blocks",
        "KV blocks of the worker: held by requests, reserved ones included (active); those that"
        " picks may fill, fewer than all after preemptions (usable); all (total). Kinds are not"
        " for adding up.",
        labels=[*LABELS, "kind"],
    )
    requests = GaugeMetricFamily(
        "kvroute_worker_requests",
        "Requests at the worker: running and waiting, as its engine reports; open reservations"
        " of this router (reserved), which are among them. States are not for adding up.",
        labels=[*LABELS, "state"],
    )
    prefill = _gauges("prefill_tokens_active", "Prompt tokens sent to it and not computed yet.")
    shares = []
    for key, source in fleet.view.sources.items():
        names, load = _names(source), fleet.load_of(key)
        is_up = not fleet.excluded(source)
        up.add_metric(names, is_up)
        blocks.add_metric([*names, "active"], load.active_blocks())
        requests.add_metric([*names, "running"], load.running)
        requests.add_metric([*names, "waiting"], load.waiting)
        requests.add_metric([*names, "reserved"], load.requests)
        prefill.add_metric(names, load.prefill_tokens_active)
        if source.heartbeat is not None and source.heartbeat.total_blocks:
            total = source.heartbeat.total_blocks
            share = fleet.capacities.block_share(key, source.heartbeat)
            blocks.add_metric([*names, "total"], total)
            blocks.add_metric([*names, "usable"], share * total)
            if is_up:
                shares.append(load.active_blocks() / source.heartbeat.total_blocks)
    yield from (up, blocks, requests, prefill)
    mean = float(np.mean(shares)) if shares else 0.0
    yield gauge(
        "kvroute_load_balance_score",
        "Standard deviation / mean of the load of workers that are up; 0 is even.",
        float(np.std(shares)) / mean if mean else 0.0,
    )


def _capacities(fleet: Fleet) -> Iterator[Metric]:
    slots = GaugeMetricFamily(
        "kvroute_worker_slots",
        "Requests that the worker can run at once, by the number's source: known, or estimated.",
        labels=[*LABELS, "source"],
    )
    preemptions = CounterMetricFamily(
        "kvroute_worker_preemptions",
        "Requests that the engine put off for want of KV blocks, as it counts since its start.",
        labels=LABELS,
    )
    for key, source in fleet.view.sources.items():
        if (heartbeat := source.heartbeat) is None:
            continue
        names = _names(source)
        preemptions.add_metric(names, heartbeat.preemptions)
        if heartbeat.total_slots:
            slots.add_metric([*names, "known"], heartbeat.total_slots)
        elif (estimated := fleet.capacities.slots(key, heartbeat)) is not None:
            slots.add_metric([*names, "estimated"], estimated)
    yield from (slots, preemptions)


def _numbers(fleet: Fleet) -> Iterator[Metric]:
    """Further numbers of the engines' metrics pages (events/engines/numbers.py)."""
    counters = {
        name: CounterMetricFamily(f"kvroute_worker_{name}", each.meaning, labels=LABELS)
        for name, each in _COUNTERS.items()
    }
    numbers = GaugeMetricFamily("kvroute_worker_number", _NUMBERS, labels=[*LABELS, "name"])
    for source in fleet.view.sources.values():
        if source.heartbeat is None:
            continue
        names = _names(source)
        for name, value in source.heartbeat.known_numbers().items():
            if name in counters:
                counters[name].add_metric(names, value)
            elif name not in NUMBERS or name in GAUGES:
                numbers.add_metric([*names, name], value)
    yield from (*counters.values(), numbers)


def _outcomes(fleet: Fleet) -> Metric:
    outcomes = CounterMetricFamily(
        "kvroute_worker_outcomes",
        "Requests of this router that a worker got, by how they ended.",
        labels=[*LABELS, "outcome"],
    )
    for key, source in fleet.view.sources.items():
        names, counts = _names(source), fleet.outcomes_of(key)
        for ending in _OUTCOMES:
            outcomes.add_metric([*names, ending], counts.get(ending, 0))
        for ending, count in counts.items():
            if ending not in _OUTCOMES:
                outcomes.add_metric([*names, ending], count)
    return outcomes


def _reports(fleet: Fleet) -> Iterator[Metric]:
    ejected = _gauges("ejected", "1 while the worker gets no requests, since earlier ones failed.")
    cached = CounterMetricFamily(
        "kvroute_worker_prompt_tokens_reported",
        "Tokens of prompts whose cached tokens were reported: all of them (prompt), those that"
        " the index had predicted as cached, those that the engine reported as cached.",
        labels=[*LABELS, "kind"],
    )
    for key, source in fleet.view.sources.items():
        names, report = _names(source), fleet.cache_report_of(key)
        ejected.add_metric(names, bool(fleet.outliers.reason(key)))
        cached.add_metric([*names, "prompt"], report.prompt)
        cached.add_metric([*names, "predicted"], report.predicted)
        cached.add_metric([*names, "cached"], report.reported)
    yield from (ejected, cached)


def _gauges(name: str, description: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvroute_worker_{name}", description, labels=LABELS)


def _names(source: Source) -> list[str]:
    """The values of LABELS; the role is empty until the first heartbeat."""
    role = "" if source.heartbeat is None else source.heartbeat.role
    return [source.key.worker_id, str(source.key.dp_rank), role]
