"""Pools: the workers that serve a model, and the columns that a decision about them begins with.

What heartbeats, streams and reservations say of a worker is written into columns when it changes,
one place for each slot of the index. So a decision over a thousand workers reads a few arrays, and
not one object a worker.

A worker is *up* if it beats, answers and is not ejected; all others are *kept out*. Most decisions
see a pool of workers that are up. The last resort is for a request that none of these may take,
whether or not they have room: workers that fell silent together or whose heartbeats can't be read,
and, after them, ejected workers. Their fault is known, while silence may be none.

Laws:
- after `refresh`, the columns agree with the fleet view and the loads;
- a worker of the last resort is in no pool of `live`;
- an ejected worker is in the last pool of `last_resorts` alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf, nan
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from events.engines.numbers import GAUGES
from events.feed.fleet_view import FleetView, Source, schedulable
from events.feed.stream import StreamState
from events.plane.facts import Heartbeat
from indexer.identity import WorkerKey
from router.fleet.health.capacity import Capacities
from router.fleet.models import Models
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.load_columns import LoadColumns
from router.fleet.table import COLUMNS, NUMBERS_FROM
from router.fleet.token_times import TokenTimes
from router.request.refusal import Reason, Refusal

RECOVERING_TRUST = 0.5
"""Share of a recovering stream's overlap that counts: it was right until the gap."""
_TRUST = {
    StreamState.LIVE: 1.0,
    StreamState.RECOVERING: RECOVERING_TRUST,
    StreamState.SUSPECT: 0.0,
    StreamState.SILENT: 0.0,
}
_NAME_BOTH = "a LoRA that is to be loaded is named beside its model (lora_name)"
_FULL = COLUMNS.index("full")
_ACTIVE = [COLUMNS.index(column) for column in ("running", "waiting", "reserved")]
_ACTIVE_SLOTS, _TOTAL_SLOTS = COLUMNS.index("active_slots"), COLUMNS.index("total_slots")
_ACTIVE_BLOCKS, _TOTAL_BLOCKS = COLUMNS.index("active_blocks"), COLUMNS.index("total_blocks")
_POOLS_MAX = 1024
"""Pools that are remembered, by the model's name in the request."""
_Group = tuple[str, str]
"""Model and role."""
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Workers that serve one model, all with a heartbeat."""

    sources: tuple[Source, ...]
    workers: tuple[WorkerKey, ...]
    slots: npt.NDArray[np.intp]
    span: slice | None
    """The slots as a slice, if they follow one another, as in a fleet of one model; else None."""
    block_sizes: frozenset[int]
    only_block_size: int
    """The block size that all workers have, in tokens; 0: theirs differ, or are unknown."""
    roles: frozenset[str]
    shortest_len: float
    """The least max_model_len of the workers, tokens; inf: no worker reports one."""
    models: tuple[str, ...]
    """Model of each worker, as its engine calls it."""
    only_model: str | None
    """The model that all workers serve; None: there are several models, or no worker."""
    name_hashes: npt.NDArray[np.uint64]
    """Hash of each worker's id and rank."""
    role_names: npt.NDArray[np.str_]
    """The role of each worker."""
    _of_it: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def made(self, make: Callable[..., _Made], *about: Hashable) -> _Made:
        """Result of make(pool, *about), which is called once; its result is kept with the pool."""
        key = make, *about
        known = self._of_it.get(key)
        if known is None:
            known = self._of_it[key] = make(self, *about)
        made: _Made = known
        return made

    @classmethod
    def of(cls, sources: Collection[Source]) -> "Pool":
        heartbeats = [heartbeat_of(source) for source in sources]
        slots = [source.slot for source in sources]
        sizes = {heartbeat.block_size for heartbeat in heartbeats}
        in_a_row = bool(slots) and slots == list(range(slots[0], slots[0] + len(slots)))
        return cls(
            sources=tuple(sources),
            workers=tuple(source.key for source in sources),
            slots=np.array(slots, np.intp),
            span=slice(slots[0], slots[0] + len(slots)) if in_a_row else None,
            block_sizes=frozenset(sizes),
            only_block_size=sizes.pop() if len(sizes) == 1 else 0,
            roles=frozenset(heartbeat.role for heartbeat in heartbeats),
            shortest_len=min(
                (heartbeat.max_model_len or inf for heartbeat in heartbeats), default=inf
            ),
            models=tuple(heartbeat.model for heartbeat in heartbeats),
            only_model=_only({heartbeat.model for heartbeat in heartbeats}),
            name_hashes=np.array(
                [
                    xxh3_64_intdigest(source.key.worker_id.encode(), source.key.dp_rank)
                    for source in sources
                ],
                np.uint64,
            ),
            role_names=np.array([heartbeat.role for heartbeat in heartbeats], np.str_),
        )

    def __len__(self) -> int:
        return len(self.sources)


def _only(models: set[str]) -> str | None:
    return models.pop() if len(models) == 1 else None


class _Identity(NamedTuple):
    """The fields that decide in which pools a worker is, and a pool's properties."""

    slot: int
    model: str
    model_aliases: tuple[str, ...]
    lora_names: tuple[str, ...]
    loads_loras: bool
    block_size: int
    role: str
    max_model_len: int
    engine: str
    kv_connector: str
    kv_engine_id: str
    labels: Mapping[str, str]

    @classmethod
    def of(cls, slot: int, heartbeat: Heartbeat) -> "_Identity":
        return cls(slot, *_OF_HEARTBEAT(heartbeat))


_OF_HEARTBEAT = attrgetter(*_Identity._fields[1:])  # all but the slot


class LastResort(NamedTuple):
    """Workers of a model that may get a request which no answering worker may take."""

    pool: Pool
    """These workers, and those that answer, since the halves of a pair are chosen apart."""
    reasons: Sequence[str]
    """Why each worker of the pool is a last resort; empty for a worker that answers."""
    kept_out: list[tuple[Source, str]]
    """The model's workers that are not in the pool, each with the reason."""


def _last_resort(
    up: Pool, kept_out: list[tuple[Source, str]], kept: list[tuple[Source, str]]
) -> LastResort:
    return LastResort(
        Pool.of([*up.sources, *(source for source, _ in kept)]),
        [*("" for _ in up.sources), *(reason for _, reason in kept)],
        [source for source in kept_out if source not in kept],
    )


class Pools:
    """The pool of every model, and the columns of all workers."""

    def __init__(
        self,
        view: FleetView,
        models: Models,
        load_of: Callable[[WorkerKey], WorkerLoad],
        capacities: Capacities,
        token_times: TokenTimes,
        ejected: Callable[[WorkerKey], str] = lambda _: "",
        on_moved: Callable[[WorkerKey, int], None] = lambda *_: None,
    ) -> None:
        """ejected: returns why a worker is ejected; empty: it isn't. The owner calls `on_ejected`
        when that has changed, and `on_capacity` when a capacity has. on_moved: called with a worker
        and its new slot when its slot changes.
        """
        self._on_moved = on_moved
        self._view = view
        self._ejected = ejected
        self._models = models
        self._load_of = load_of
        self._capacities = capacities
        self._token_times = token_times
        self.columns = np.zeros((len(COLUMNS), 0))
        """Shape (len(COLUMNS), slots); replaced by a larger array once there are more slots."""
        self.others_waiting = np.zeros(0)
        """Waiting requests that no router of the fleet sent, at the worker of each slot
        (Candidates.others_waiting). Replaced together with `columns`."""
        self.written = LoadColumns()
        """Writes loads into `columns` and `others_waiting`."""
        self._settled = self.written.settled
        self._full, self._over_estimate = self.written.full, self.written.over_estimate
        self._kept_out: dict[WorkerKey, str] = {}
        """Worker that is kept out -> the reason."""
        self._identities: dict[WorkerKey, _Identity] = {}
        self._pools: dict[str, tuple[Pool, list[tuple[Source, str]]]] = {}
        """Name of a model -> its workers that are up; and the others, each with the reason."""
        self._last_resorts: dict[str, tuple[LastResort, ...]] = {}
        """Name of a model -> its pools of the last resort, in the order of trying."""
        self._answering: dict[_Group, dict[WorkerKey, None]] = {}
        """Model and role -> workers that beat and answer, ejected or not."""
        self._up: dict[_Group, list[WorkerKey]] = {}
        """Model and role -> workers that are up; of those that `up` was called for."""
        self._group_of: dict[WorkerKey, _Group] = {}
        """Worker of `_answering` -> its model and role."""
        self._silence: tuple[bool, frozenset[str]] = (False, frozenset())
        self._served: Counter[str] = Counter()
        """Name of a model, alias or LoRA -> number of workers whose heartbeats have it. An unknown
        name costs one look here, however many workers and LoRAs there are."""
        self._served_loras: Counter[str] = Counter()
        self._served_models: Counter[str] = Counter()
        """Model as its engines call it -> number of workers; empty name: it is not known yet."""
        self._loading: Counter[str] = Counter()
        """Models whose workers load LoRAs on demand -> count of such workers."""

    def refresh(self) -> None:
        """Updates columns and pools by what has changed in the fleet view since the last call."""
        silence = self._view.mass_silence, self._view.silent_models
        if self._silence != silence:
            self._silence = silence
            self.forget_live()
        changed = self._view.take_changed() if self._view.has_changed else ()
        for key in changed:  # slots first: another worker may have the slot that one has left
            known, source = self._identities.get(key), self._view.sources.get(key)
            if known is not None and (source is None or source.slot != known.slot):
                self.written.drop(known.slot)
                if source is not None:
                    self._on_moved(key, source.slot)
        for key in changed:
            source = self._view.sources.get(key)
            if source is None or source.heartbeat is None:
                self._kept_out.pop(key, None)
                self._join(key, None)
                if (known := self._identities.pop(key, None)) is not None:
                    self._count_names(known, -1)
                    self.forget_live()
                continue
            self._make_room(source.slot)
            identity = _Identity.of(source.slot, source.heartbeat)
            if (known := self._identities.get(key)) != identity:
                if known is not None:
                    self._count_names(known, -1)
                self._count_names(identity, 1)
                self._identities[key] = identity
                self.forget_live()
            self._settle(source, source.heartbeat)

    def put_load(self, slot: int, load: WorkerLoad) -> None:
        """Writes a worker's load into the columns."""
        self.written.put(slot, load)

    def has_room(self, pool: Pool) -> bool:
        """Whether any worker of a pool has a free slot and a free block; True for an empty pool."""
        return not self._full or not len(pool.slots) or not self.columns[_FULL, pool.slots].all()

    def has_over_estimate(self, pool: Pool) -> bool:
        """Whether some worker of a pool is full only by its learned capacity."""
        return bool(self._over_estimate) and any(
            slot in self._over_estimate for slot in pool.slots.tolist()
        )

    def blocks_promised(self, slot: int) -> float:
        """KV blocks that picks may reserve of a worker; NaN: unknown."""
        return self._settled[slot][5]

    def with_room(self, pool: Pool) -> npt.NDArray[np.intp]:
        """Slots (in the index) of a pool's workers that have a free slot and a free block."""
        slots: npt.NDArray[np.intp] = pool.slots[self.columns[_FULL, pool.slots] == 0]
        return slots

    def free(self, pool: Pool, of_role: npt.NDArray[np.bool_] | None) -> int:
        """Number of requests that a pool's workers have room for: the free slots of those that are
        not full, 1 for a worker whose slots are unknown. of_role: True for workers that count;
        None: all.
        """
        columns = self.columns[:, pool.slots]
        counts = columns[_FULL] == 0
        if of_role is not None:
            counts &= of_role
        active = columns[_ACTIVE, :][:, counts].sum(axis=0)  # active_slots has a guess in it, too
        left = columns[_TOTAL_SLOTS, counts] - active
        return int(np.where(np.isfinite(left), np.maximum(left, 1.0), 1.0).sum())

    def fill(self, pool: Pool) -> float:
        """Share of a pool's slots in use, or of its blocks if that is more: 0 to 1 and beyond.
        Workers whose total is unknown are left out."""
        columns = self.columns[:, pool.slots]
        shares = [0.0]
        for taken, total in ((_ACTIVE_SLOTS, _TOTAL_SLOTS), (_ACTIVE_BLOCKS, _TOTAL_BLOCKS)):
            known = np.isfinite(columns[total])
            if most := columns[total][known].sum():
                shares.append(float(columns[taken][known].sum() / most))
        return max(shares)

    def with_over_estimate(
        self, pool: Pool, table: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64] | None:
        """A pool's columns in which workers over their estimates are not full; None: no worker of
        the pool is over its estimate.

        table: the pool's present columns, which are not changed.
        """
        if not self._over_estimate:
            return None
        rows = [row for row, slot in enumerate(pool.slots.tolist()) if slot in self._over_estimate]
        if not rows:
            return None
        table = table.copy()
        table[_FULL, rows] = 0.0
        return table

    def live(self, model: str, ready: bool) -> tuple[Pool, list[tuple[Source, str]]]:
        """The workers of a model that are up, and the others, each with the reason.

        model: any of its names; empty: the only model of the fleet. ready: False: some workers may
        not be known yet. An unknown name stands for the model whose workers may load it as a LoRA.
        Raises Refusal if no worker serves it, up or not.
        """
        parts = self._pools.get(model)
        if parts is None and ready and (base := self.loading_model(model)):
            parts = self.live(base, ready)
            self._keep(model, parts)
        if parts is None:
            up: list[Source] = []
            kept_out: list[tuple[Source, str]] = []
            for source in self._serving(model, ready):
                if reason := self.kept_out(source):
                    kept_out.append((source, reason))
                else:
                    up.append(source)
            parts = Pool.of(up), kept_out
            self._keep(model, parts)
        return parts

    def last_resorts(self, model: str, ready: bool) -> tuple[LastResort, ...]:
        """Pools for a request that no worker of `live` may take, in the order of trying: the silent
        workers, then the silent and the ejected ones together. Empty: there are none.
        """
        if model not in self._last_resorts:
            up, kept_out = self.live(model, ready)
            kept = [(source, reason) for source, reason in kept_out if self.may_be_last(source)]
            unheard = [worker for worker in kept if not self._ejected(worker[0].key)]
            tiers = [unheard, kept] if unheard and len(unheard) < len(kept) else [kept]
            self._last_resorts[model] = tuple(
                _last_resort(up, kept_out, tier) for tier in tiers if tier
            )
        return self._last_resorts[model]

    def kept_out(self, source: Source) -> str:
        """Why a worker gets no requests while other workers answer; empty when it may get
        requests.
        """
        return schedulable(source) or self._ejected(source.key)

    def may_be_last(self, source: Source) -> bool:
        """Whether a worker that is kept out may serve as last resort."""
        return not schedulable(source) or self._view.last_resort(source)

    def group(self, source: Source) -> Collection[WorkerKey]:
        """The workers of the same model and role that beat and answer, ejected or not."""
        return self._answering.get(self._group(source), {}) if source.heartbeat is not None else ()

    def up(self, source: Source) -> Collection[WorkerKey]:
        """The workers of a worker's group that are not kept out."""
        if source.heartbeat is None:
            return ()
        group = self._group(source)
        if group not in self._up:
            self._up[group] = [
                key
                for key in self._answering.get(group, {})
                if not self.kept_out(self._view.sources[key])
            ]
        return self._up[group]

    def on_ejected(self, key: WorkerKey) -> None:
        """Records that a worker's ejection began or ended."""
        source = self._view.sources.get(key)
        if source is not None and key in self._identities:
            self._note_kept_out(source)
            self._last_resorts.clear()  # also for a silent worker, whose reason stays the same

    def on_capacity(self, key: WorkerKey) -> None:
        """Records that a worker's learned capacity has changed."""
        source, known = self._view.sources.get(key), self._identities.get(key)
        if source is None or source.heartbeat is None or known is None:
            return
        if known.slot == source.slot:  # of another slot, `refresh` is still to take it over
            self._settle_room(source, source.heartbeat)

    def on_capacities(self) -> None:
        """Records that the learned capacities of all workers may have changed."""
        for key in self._identities:
            self.on_capacity(key)

    def forget_live(self) -> None:
        """Has every pool made again at its next use, since other workers are kept out now."""
        self._up.clear()
        self._pools.clear()
        self._last_resorts.clear()

    def table(self, pool: Pool) -> npt.NDArray[np.float64]:
        """The present columns of a pool, shape (len(COLUMNS), workers of the pool). Read only:
        where the pool's slots are contiguous they are a view of the fleet's own columns, else a
        copy.
        """
        if pool.span is not None:
            return self.columns[:, pool.span]
        return self.columns.take(pool.slots, axis=1)

    def lora_of(self, model: str) -> str:
        """LoRA that a request means by its model's name; empty when that is the name of a model."""
        if not model or not (self._served_loras or self._loading):
            return ""
        names = self._models.names(model)
        loaded = next((name for name in names if name in self._served_loras), "")
        return loaded or (model if self.loading_model(model) else "")

    def loading_model(self, name: str) -> str:
        """The model whose workers may load an unknown name as a LoRA, on demand.

        Empty: no worker loads LoRAs on demand, or workers of several models do, so that a request
        has to name the model and the LoRA; or the name is a model's that has no worker now.
        """
        if not self._loading or not name or name in self._served or self._models.is_whole(name):
            return ""
        models = {self._models.names(model)[0] for model in self._loading if model}
        return models.pop() if len(models) == 1 else ""

    def _keep(self, model: str, parts: tuple[Pool, list[tuple[Source, str]]]) -> None:
        if len(self._pools) >= _POOLS_MAX:
            self.forget_live()
        self._pools[model] = parts

    def _count_names(self, identity: _Identity, change: int) -> None:
        """Counts a worker that began (1) or ceased (-1) to serve its models' names."""
        counted = (
            (self._served, {identity.model, *identity.model_aliases, *identity.lora_names}),
            (self._served_loras, set(identity.lora_names)),
            (self._served_models, {identity.model}),
            (self._loading, {identity.model} if identity.loads_loras else ()),
        )
        for counter, names in counted:
            for name in names:
                counter[name] += change
                if not counter[name]:
                    del counter[name]

    def _group(self, source: Source) -> _Group:
        heartbeat = heartbeat_of(source)
        return self._models.names(heartbeat.model)[0], heartbeat.role

    def _join(self, key: WorkerKey, group: _Group | None) -> None:
        """Records the model and role in which a worker answers; None: it does not answer."""
        before = self._group_of.get(key)
        if before == group:
            return
        if before is not None:
            of_group = self._answering[before]
            del of_group[key], self._group_of[key]
            self._up.pop(before, None)
            if not of_group:
                del self._answering[before]
        if group is not None:
            self._answering.setdefault(group, {})[key] = None
            self._up.pop(group, None)
            self._group_of[key] = group

    def _settle(self, source: Source, heartbeat: Heartbeat) -> None:
        numbers = [heartbeat.numbers.get(name, nan) for name in GAUGES]
        self.columns[NUMBERS_FROM:, source.slot] = numbers
        self._settle_room(source, heartbeat)
        self._join(source.key, None if schedulable(source) else self._group(source))
        self._note_kept_out(source)

    def _settle_room(self, source: Source, heartbeat: Heartbeat) -> None:
        room = self._capacities.room(source.key, heartbeat)
        self._settled[source.slot] = (
            heartbeat.block_size,
            heartbeat.total_blocks or nan,
            room.slots,
            _TRUST[source.stream.state],
            room.slots_known,
            room.blocks,
            room.prefill_tokens,
            room.prefills,
            room.decodes,
            *self._token_times.of(source.key, heartbeat),
        )
        self.put_load(source.slot, self._load_of(source.key))

    def _note_kept_out(self, source: Source) -> None:
        kept_out = self.kept_out(source)
        if self._kept_out.get(source.key, "") != kept_out:
            self.forget_live()
            if kept_out:
                self._kept_out[source.key] = kept_out
            else:
                del self._kept_out[source.key]

    def _make_room(self, slot: int) -> None:
        there = self.columns.shape[1]
        if slot >= there:
            more = max(slot + 1, 2 * there) - there
            self.columns = np.pad(self.columns, ((0, 0), (0, more)))
            self.others_waiting = np.pad(self.others_waiting, (0, more))
            self.written.use(self.columns, self.others_waiting)

    def _serving(self, model: str, ready: bool) -> list[Source]:
        if model and not any(name in self._served for name in self._models.names(model)):
            raise self._refusal(model, ready)
        sources = self._view.sources
        known = [source for source in sources.values() if source.heartbeat is not None]
        if not model:
            self._check_one_model()
            # A worker without a known model may serve any: it counts only if all are such.
            named = [source for source in known if heartbeat_of(source).model]
            pool = named or known
        else:
            pool = [source for source in known if self._models.serves(heartbeat_of(source), model)]
        if pool:
            return pool
        raise self._refusal(model, ready)

    def _refusal(self, model: str, ready: bool) -> Refusal:
        """The refusal of a request for a model without workers."""
        if not self._view.sources and not self._models.seen:
            return Refusal(Reason.NO_WORKER, "no worker is known yet")
        if self._models.known(model):
            return Refusal(Reason.NO_WORKER, f"no worker serves {model!r} at the moment")
        if not self._identities:
            return Refusal(Reason.NO_WORKER, "no known worker has named its model yet")
        if not ready:
            return Refusal(
                Reason.NO_WORKER,
                f"no worker known so far serves {model!r}; the router has just started",
            )
        return Refusal(
            Reason.UNKNOWN_MODEL,
            f"unknown model {model!r}; served here: {_first(self._served_models) or 'none'}"
            + (f"; {_NAME_BOTH}" if self._loading else ""),
        )

    def _check_one_model(self) -> None:
        """Raises Refusal if the fleet serves several models, so that a request must name one."""
        models = {self._models.names(name)[0] for name in self._served_models if name}
        if len(models) > 1:
            raise Refusal(
                Reason.MODEL_REQUIRED,
                f"this fleet serves {len(models)} models, so the request must name one:"
                f" {_first(models)}",
            )


def _first(models: Iterable[str]) -> str:
    """The first ten models by name, as a list in a sentence."""
    return ", ".join(nsmallest(10, models))


def heartbeat_of(source: Source) -> Heartbeat:
    """The heartbeat of a source that has had one; AssertionError for any other."""
    if source.heartbeat is None:
        raise AssertionError(f"no heartbeat of worker {source.key} has come")
    return source.heartbeat
