"""Candidates made of plain numbers, for tests of what is computed from them."""

from collections.abc import Mapping
from math import isnan, nan
from typing import Any

import numpy as np

from events.engines.numbers import GAUGES
from events.feed.fleet_view import Source
from events.feed.stream import Stream
from events.plane.facts import Epoch, Heartbeat
from indexer.hashing import pack_tokens
from indexer.identity import WorkerKey
from router.decide.decision.decision import Overlap
from router.decide.policies.candidates import Candidates
from router.fleet.eligibility import Barred
from router.fleet.on_demand import Further
from router.fleet.pools import Pool
from router.fleet.rates import PrefillRates
from router.fleet.reservations.load import WorkerLoad
from router.fleet.table import COLUMNS
from router.fleet.working_set import SAMPLE, WorkingSets
from router.request.prompt import Prompt
from router.request.request import Request

TIERS = ("device_tokens", "host_tokens", "disk_tokens")
NOW_S = 1_790_000_000.0
RATE = 1000.0
"""Tokens a second."""


def rows(
    prompt_tokens: int, *workers: Mapping[str, Any], request: Mapping[str, Any] | None = None
) -> Candidates:
    """Candidates of what a test says about them; what it doesn't is zero, or unknown.

    overlap_tokens without its tiers is on the device. What can be said beside the columns: labels,
    excluded, recent_blocks (a multiple of SAMPLE), invested_tokens, in_use (blocks of the prompt
    that open requests use), external (requests of others), prefills (new and all tokens of each
    prompt that was just sent there; the rate is RATE).
    request: of its fields, those that matter.
    """
    unsaid = dict.fromkeys((*COLUMNS, "overlap_tokens"), 0.0) | {
        "block_size": 16.0,
        "trust": 1.0,
        "total_blocks": nan,
        "total_slots": nan,
        "tpot_s": nan,
        **dict.fromkeys(GAUGES, nan),
    }
    table = np.zeros((len(COLUMNS), len(workers)))
    tokens = np.zeros((len(Overlap._fields), len(workers)), np.int32)
    sources, loads, rates, working_sets = [], {}, PrefillRates(RATE), WorkingSets()
    for i, worker in enumerate(workers):
        tiers = [worker.get(name, 0) for name in TIERS]
        if not any(tiers):
            tiers[0] = worker.get("overlap_tokens", 0)
        tokens[:, i] = [sum(tiers), sum(tiers), *tiers, 0]
        said: dict[str, Any] = unsaid | {"overlap_tokens": sum(tiers)} | dict(worker)
        slots = said["running"] + said["waiting"] + said["reserved"]
        names = ("load", "slot_ratio", "full", "load_unknown")
        derived = shares(slots, said["active_blocks"], said["total_slots"], said["total_blocks"])
        said |= {"active_slots": slots} | dict(zip(names, derived, strict=True))
        table[:, i] = [said[name] for name in COLUMNS]
        key = WorkerKey(said.get("worker_id", f"w{i}"), 0)
        sources.append(_source(i, key, int(said["block_size"]), said.get("labels", {})))
        loads[key] = _load(prompt_tokens, int(said["block_size"]), said.get("in_use", 0))
        loads[key].external_requests = said.get("external", 0.0)
        for number, (new_tokens, all_tokens) in enumerate(said.get("prefills", ())):
            rates.on_pick(key, i, "m", f"{number}", new_tokens, all_tokens, NOW_S)
        recent = np.arange(0, said.get("recent_blocks", 0), SAMPLE, dtype=np.uint64) * SAMPLE
        working_sets.on_pick(key, i, recent, NOW_S)
    pool = Pool.of(sources)
    about: dict[str, Any] = {"request_id": "r", "prompt": _prompt(prompt_tokens)}
    return Candidates(
        barred=Barred.of([worker.get("excluded", "") for worker in workers]),
        table=table,
        request=Request(**about | dict(request or {})),
        tokens=tokens,
        pool=pool,
        further=Further(loads, rates, working_sets=working_sets),
        now_s=NOW_S,
        invested_tokens=np.array([worker.get("invested_tokens", 0.0) for worker in workers]),
    )


def shares(
    active_slots: float, active_blocks: float, total_slots: float, total_blocks: float
) -> tuple[float, float, float, float]:
    """load, slot_ratio, full and load_unknown of one worker; NaN: an unknown total, which is never
    full."""
    return (
        active_blocks / total_blocks if total_blocks > 0 else 0.0,
        active_slots / total_slots if total_slots > 0 else 0.0,
        float(active_slots >= total_slots or active_blocks >= total_blocks),
        float(isnan(total_blocks)),
    )


def _prompt(tokens: int) -> Prompt:
    return Prompt.from_tokens(pack_tokens(range(tokens)))


def _source(slot: int, key: WorkerKey, block_size: int, labels: Mapping[str, str]) -> Source:
    epoch = Epoch(1, 1)
    source = Source(key, slot, Stream(3.0, NOW_S))
    source.heartbeat = Heartbeat(
        epoch=epoch,
        sent_at_s=NOW_S,
        address=f"http://{key.worker_id}",
        engine="vllm",
        model="m",
        block_size=block_size,
        labels=dict(labels),
    )
    return source


def _load(prompt_tokens: int, block_size: int, in_use: int) -> WorkerLoad:
    load = WorkerLoad()
    if in_use:
        load.open(_prompt(prompt_tokens).prefixes(block_size)[:in_use], False, 0, NOW_S)
    return load
