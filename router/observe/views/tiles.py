"""Tiles: what the console shows of each worker, the main numbers of ListWorkers. Pure."""

from math import isfinite

import msgspec

from events.feed.fleet_view import Source
from events.feed.stream import StreamState
from indexer.identity import Tier
from router.decide.core.core import RouterCore
from router.fleet.health.warnings import WorkerWarning
from router.fleet.table import COLUMNS

WARNINGS_MAX = 8
"""Warnings of a tile, at most; `Tile.warnings_left_out` counts the others."""
SENTENCE_MAX = 400
"""Most characters of a warning's sentence; the rest is cut off."""
LATE_S = 2.0
"""Seconds from which a tile has the age of the last beat; a lower age is 0 there, so that the tile
of an idle worker does not change."""
_TRUST = COLUMNS.index("trust")


class Ejected(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker that gets no requests since earlier ones failed there."""

    cause: str
    until_s: float
    """Unix time from which a request may try the worker again (probe)."""
    probing: bool = False
    times: int = 0


class Tile(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The shown numbers of one rank of a worker; fields named as in WorkerStatus have the same
    meaning.
    """

    worker_id: str
    dp_rank: int
    model: str = ""
    role: str = ""
    engine: str = ""
    """Name of the engine, with its version."""
    address: str = ""
    stream_state: str
    stream_complete: bool = False
    stream_reason: str = ""
    unschedulable_reason: str = ""
    """Why the worker gets no requests; empty: it may get some."""
    drained: bool = False
    last_resort: bool = False
    approximate: bool = False
    ejected: Ejected | None = None
    running: int = 0
    waiting: int = 0
    reserved: int = 0
    reserved_by_replicas: int = 0
    active_requests: float
    """Running, waiting and reserved, each request counted once."""
    slots: int | None = None
    slots_estimated: bool = False
    active_blocks: float
    total_blocks: int | None = None
    block_share: float
    blocks_held: int = 0
    """Blocks that the worker holds on device, host and disk."""
    blocks_predicted: int = 0
    prefill_tokens_active: int = 0
    numbers: dict[str, float] = {}
    """Further numbers of its engine by name, the operator's own included
    (events/engines/numbers.py)."""
    trust: float
    """Share of the usable overlap that decisions count, by its stream's state: 1 while live."""
    beat_late_s: int = 0
    """Age of the last beat in whole seconds, from LATE_S on."""
    warnings: list[WorkerWarning] = []
    warnings_left_out: int = 0


def tile_of(source: Source, core: RouterCore, now_s: float) -> Tile:
    """The present tile of a worker. Reads only."""
    fleet, key, stream, heartbeat = core.fleet, source.key, source.stream, source.heartbeat
    load, index = fleet.load_of(key), fleet.view.index
    warnings = fleet.warnings(source, now_s)
    age_s = now_s - stream.last_beat_s
    slots, estimated = None, False
    if heartbeat is not None:
        slots = heartbeat.total_slots or None
        if slots is None and (known := fleet.capacities.slots(key, heartbeat)) is not None:
            slots, estimated = int(known), True
    return Tile(
        worker_id=key.worker_id,
        dp_rank=key.dp_rank,
        model="" if heartbeat is None else fleet.models.names(heartbeat.model)[0],
        role="" if heartbeat is None else heartbeat.role,
        engine=""
        if heartbeat is None
        else f"{heartbeat.engine} {heartbeat.engine_version}".strip(),
        address="" if heartbeat is None else heartbeat.address,
        stream_state=stream.state.value,
        stream_complete=fleet.view.complete(source),
        stream_reason=stream.reason,
        unschedulable_reason=fleet.excluded(source),
        drained=key.worker_id in fleet.drained,
        last_resort=fleet.last_resort(source),
        approximate=source.approximate,
        ejected=_ejected(source, core),
        running=load.running,
        waiting=load.waiting,
        reserved=load.requests,
        reserved_by_replicas=load.replicas.requests,
        active_requests=round(load.active_requests(), 1),
        slots=slots,
        slots_estimated=estimated,
        active_blocks=round(load.active_blocks(), 1),
        total_blocks=None if heartbeat is None else heartbeat.total_blocks or None,
        block_share=1.0 if heartbeat is None else fleet.capacities.block_share(key, heartbeat),
        blocks_held=sum(index.count(source.slot, tier) for tier in Tier),
        blocks_predicted=index.predicted(source.slot),
        prefill_tokens_active=load.prefill_tokens_active,
        numbers={} if heartbeat is None else heartbeat.known_numbers(),
        trust=_trust(source, core),
        beat_late_s=int(age_s) if age_s >= LATE_S else 0,
        warnings=[
            WorkerWarning(code, sentence[:SENTENCE_MAX])
            for code, sentence in warnings[:WARNINGS_MAX]
        ],
        warnings_left_out=max(0, len(warnings) - WARNINGS_MAX),
    )


def standing_of(source: Source, core: RouterCore) -> tuple[str, str]:
    """The state of a worker, `drained`, `ejected`, `no heartbeat` or its stream's, and the reason
    of that state, or ""."""
    if source.key.worker_id in core.fleet.drained:
        return "drained", ""
    standing = core.fleet.outliers.standing(source.key)
    if standing is not None and standing.cause is not None:
        return "ejected", standing.cause
    if source.stream.state is StreamState.LIVE and source.heartbeat is None:
        return "no heartbeat", ""
    return source.stream.state.value, source.stream.reason


def _ejected(source: Source, core: RouterCore) -> Ejected | None:
    standing = core.fleet.outliers.standing(source.key)
    if standing is None or standing.cause is None:
        return None
    return Ejected(standing.cause, standing.until_s, standing.probing, standing.times)


def _trust(source: Source, core: RouterCore) -> float:
    columns = core.fleet.pools.columns
    if source.slot >= columns.shape[1]:
        return 1.0
    trust = columns.item(_TRUST, source.slot)
    return round(trust, 3) if isfinite(trust) else 1.0
