"""Writes the status of a worker, for the RPCs ListWorkers and WatchWorkers."""

from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from indexer.identity import Tier
from kvroute.v1 import fleet_pb2
from router.decide.core.core import RouterCore
from router.fleet.observed import Observed, ObservedWorker

_OF_HEARTBEAT = (
    "address", "engine", "engine_version", "model", "max_model_len", "block_size",
    "engine_block_size", "role", "kv_connector", "bootstrap_host", "bootstrap_port", "preemptions",
)  # fmt: skip
"""Fields of a WorkerStatus that are copied from the worker's heartbeat, under the same names."""


def write_worker(source: Source, core: RouterCore, now_s: float) -> fleet_pb2.WorkerStatus:
    """The WorkerStatus of one worker (a rank of an engine) at the Unix time now_s, in seconds."""
    stream = source.stream
    load = core.fleet.load_of(source.key)
    excluded = core.fleet.excluded(source)
    report = core.fleet.cache_reports.get(source.key)
    index = core.fleet.view.index
    status = fleet_pb2.WorkerStatus(
        worker_id=source.key.worker_id,
        dp_rank=source.key.dp_rank,
        schedulable=not excluded,
        unschedulable_reason=excluded,
        drained=source.key.worker_id in core.fleet.drained,
        last_resort=core.fleet.last_resort(source),
        stream_state=stream.state,
        stream_complete=core.fleet.view.complete(source),
        stream_reason=stream.reason,
        blocks_device=index.count(source.slot, Tier.DEVICE),
        blocks_host=index.count(source.slot, Tier.HOST),
        blocks_disk=index.count(source.slot, Tier.DISK),
        blocks_predicted=index.predicted(source.slot),
        blocks_forgotten=index.told(source.slot) - index.count(source.slot),
        approximate=source.approximate,
        running=load.running,
        waiting=load.waiting,
        reserved=load.requests,
        active_blocks=load.active_blocks(),
        prefill_tokens_active=load.prefill_tokens_active,
        reserved_by_replicas=load.replicas.requests,
        beat_age_s=max(0.0, now_s - stream.last_beat_s),
        hit_ratio=report.reported / report.predicted if report and report.predicted else 0.0,
        warnings=[warning.sentence for warning in core.fleet.warnings(source, now_s)],
        outcomes={
            ending.value: count for ending, count in core.fleet.outcomes_of(source.key).items()
        },
    )
    standing = core.fleet.outliers.standing(source.key)
    if standing is not None and standing.cause is not None:
        ejection = status.ejection
        ejection.reason = standing.cause
        ejection.until.FromNanoseconds(int(standing.until_s * 1e9))
        ejection.probing = standing.probing
        ejection.times = standing.times
        ejection.replica = standing.replica
    status.stream_changed_at.FromNanoseconds(int(stream.changed_at_s * 1e9))
    if load.sampled_at_s is not None:
        status.sample_age_s = max(0.0, now_s - load.sampled_at_s)
    if source.heartbeat is not None:
        _write_heartbeat(status, source, source.heartbeat, core)
    if (observed := core.fleet.observed.workers.get(source.key)) is not None:
        _write_observed(status.observed, observed, core.fleet.observed)
    return status


def _write_observed(
    written: fleet_pb2.Observed, worker: ObservedWorker, observed: Observed
) -> None:
    today = worker.today
    written.picks = worker.picks
    written.prompt_tokens = worker.prompt_tokens
    written.cached_tokens = worker.cached_tokens
    written.prompt_tokens_today = int(today.prompt_tokens)
    written.first_tokens_today = int(today.first_tokens)
    if (share := today.cached_share()) is not None:
        written.cached_share_today = share
    if (ttft_s := today.ttft_s()) is not None:
        written.ttft_ms_today = 1000 * ttft_s
    if (ttft_s := observed.ttft_s(worker)) is not None:
        written.estimated_ttft_ms = 1000 * ttft_s
        written.estimated_picks = worker.timed
    if (error := observed.ttft_error(worker)) is not None:
        written.ttft_error = error


def _write_heartbeat(
    status: fleet_pb2.WorkerStatus, source: Source, heartbeat: Heartbeat, core: RouterCore
) -> None:
    """Writes what a worker's heartbeat says (address, model, engine, labels) into its status, and
    the capacity that the router derives from that."""
    for name in _OF_HEARTBEAT:
        setattr(status, name, getattr(heartbeat, name))
    status.model_aliases.extend(heartbeat.model_aliases)
    status.lora_names.extend(heartbeat.lora_names)
    status.labels.update(heartbeat.labels)
    status.prefill_rate = core.fleet.rates.rate(source.key, heartbeat.model)
    status.prefills_measured = core.fleet.rates.samples(source.key)
    if heartbeat.total_blocks:
        status.total_blocks = heartbeat.total_blocks
    if heartbeat.total_slots:
        status.total_slots = heartbeat.total_slots
    if (slots := core.fleet.capacities.slots(source.key, heartbeat)) is not None:
        status.slots_estimated = slots
    status.block_share = core.fleet.capacities.block_share(source.key, heartbeat)
    status.numbers.update(heartbeat.known_numbers())
    if heartbeat.token_budget is not None:
        status.token_budget = heartbeat.token_budget


def take_ages(status: fleet_pb2.WorkerStatus) -> fleet_pb2.WorkerStatus:
    """Moves beat_age_s and sample_age_s, which change with time alone, from a status into the
    returned status. The bytes of both, one after the other, are the whole status again."""
    ages = fleet_pb2.WorkerStatus()
    for name in ("beat_age_s", "sample_age_s"):
        if status.HasField(name):
            setattr(ages, name, getattr(status, name))
            status.ClearField(name)
    return ages
