"""The relay of one engine rank in virtual time. Pure.

The scheduler's events become facts: physical copies are counted as in the relay's ledger,
messages get their numbers and bytes from the relay's real outbox. Blocks keep the scheduler's
names, which in a virtual fleet are the router's own PrefixHashes.

Law: the facts, applied in order, give the relay's blocks; and while the stream is complete, these
are the blocks by the engine's events.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from events.plane.facts import TIER_NAMES, Epoch, Heartbeat, Stored, encode, pack_hashes
from events.relay.ledger import BLOCKS_MAX, Change, HeldBlocks
from events.relay.outbox import Outbox
from events.relay.rank import EngineState, Publish, Rank, RankEffect
from events.relay.snapshot import CHUNK_BYTES
from indexer.identity import PrefixHash, Tier, WorkerKey
from simulator.engines.block_pool import Cleared, PoolEvent
from simulator.engines.block_pool import Removed as BlockRemoved
from simulator.engines.block_pool import Stored as BlocksStored
from simulator.engines.scheduler import Load, SchedulerConfig
from simulator.engines.vllm_wire import encode_batch

HEALTH_S = 3.0
"""Seconds without an answer after which an engine is reported unhealthy."""


class Snapshot(NamedTuple):
    """All blocks of a relay after message `as_of`."""

    epoch: Epoch
    as_of: int
    facts: list[Stored]
    complete: bool


class NamedPrefixes(HeldBlocks):
    """The blocks of one rank, whose names are their PrefixHashes. Copies are counted to 255."""

    def __init__(self) -> None:
        super().__init__(BLOCKS_MAX, 255)

    def store(self, tier: Tier, hashes: Sequence[int], parent: int | None) -> list[Change]:
        """Adds a copy of each block of a chain."""
        before = None if parent is None else PrefixHash(parent)
        self._copies.put(hashes, np.array(hashes, np.uint64), before, tier)
        return self._changes()

    def remove(self, tier: Tier, hashes: Sequence[int]) -> list[Change]:
        """Takes a copy of each block. Unknown blocks, as on a partial stream, are ignored."""
        self._copies.remove(hashes, 0, tier)
        return self._changes()


class VirtualRelay:
    """The relay of one rank: its stream and its heartbeats."""

    def __init__(
        self,
        key: WorkerKey,
        config: SchedulerConfig,
        now_s: float,
        *,
        tells_events: bool = True,
        tells_capacity: bool = True,
        tells_slots: bool = True,
        **about: Any,
    ) -> None:
        """about: further fields of the relay's Heartbeats."""
        self.key = key
        self._blocks = NamedPrefixes()
        self.complete = True
        self.tells_events = tells_events
        self.tells_capacity = tells_capacity
        self.tells_slots = tells_capacity and tells_slots
        self.outbox = Outbox(Epoch(round(now_s * 1e9), 0))
        self._config = config
        self._about = about

    @override
    def __repr__(self) -> str:
        return f"<VirtualRelay {self.key} {self.held.count()} placements, {self.outbox!r}>"

    @property
    def held(self) -> HeldBlocks:
        """The blocks in the stream."""
        return self._blocks

    def tell(self, events: Iterable[PoolEvent], now_s: float) -> list[bytes]:
        """Adds the engine's events to the stream; returns the messages to publish."""
        if not self.tells_events:
            return []
        messages: list[bytes] = []
        for removed_from, group in groupby(events, _removed_from):
            messages += self.outbox.add(self._changes(removed_from, group), now_s)
        return messages + self.outbox.flush()

    def beat(self, now_s: float) -> list[bytes]:
        """The beat: a message with the state of the stream."""
        return [self.outbox.beat(self.held.count(), self.held.digest(), self.complete, now_s)]

    def heartbeat(self, load: Load, now_s: float, *, sampled_at_s: float) -> bytes:
        """The heartbeat: a message with the worker's identity and load. sampled_at_s: time of the
        engine's last answer."""
        config = self._config
        return encode(
            Heartbeat(
                epoch=self.outbox.epoch,
                address=f"http://{self.key.worker_id}",
                model="virtual",
                lora_names=config.lora_names,
                max_model_len=config.model_len,
                block_size=config.block_size,
                engine_block_size=config.block_size,
                healthy=now_s - sampled_at_s < HEALTH_S,
                events=self.tells_events,
                running=load.running,
                waiting=load.waiting,
                used_blocks=load.used_blocks,
                total_blocks=load.total_blocks if self.tells_capacity else None,
                total_slots=config.max_num_seqs if self.tells_slots else None,
                token_budget=config.step_tokens_max,
                preemptions=load.preemptions,
                sampled_at_s=sampled_at_s,
                sent_at_s=now_s,
                **self._about,
            )
        )

    def ring(self, from_seq: int) -> list[bytes] | None:
        """Messages from from_seq on; None when the ring lacks some of them."""
        return self.outbox.replay(from_seq)

    def snapshot(self) -> Snapshot:
        """All blocks of the stream."""
        facts = []
        for tier in Tier:
            packed = pack_hashes(self.held.held(tier))
            facts += [
                Stored(packed[at : at + CHUNK_BYTES], TIER_NAMES[tier])
                for at in range(0, len(packed), CHUNK_BYTES)
            ]
        return Snapshot(self.outbox.epoch, self.outbox.seq, facts, self.complete)

    def on_engine_restart(self, now_s: float) -> None:
        """Begins a new epoch of the stream, complete from its first message on: the engine has
        restarted."""
        self._blocks.wipe()
        self.complete = True
        self.outbox.start_over(self._next_epoch(now_s))

    def on_restart(self, now_s: float, *, keeps_map: bool) -> None:
        """Begins a new epoch of the stream, with the present blocks (keeps_map) or empty: the relay
        has restarted."""
        if not keeps_map:
            self._blocks.wipe()
            self.complete = False
        self.outbox.start_over(self._next_epoch(now_s), 1 if keeps_map else 0)

    def _next_epoch(self, now_s: float) -> Epoch:
        return Epoch(round(now_s * 1e9), self.outbox.epoch.nonce + 1)

    def _changes(self, removed_from: Tier | None, events: Iterable[PoolEvent]) -> list[Change]:
        """The changes of the relay's blocks by consecutive events: removals of one tier, or no
        removals."""
        if removed_from is not None:
            removed = (event.hashes for event in events if isinstance(event, BlockRemoved))
            return self._blocks.remove(removed_from, list(chain.from_iterable(removed)))
        changes: list[Change] = []
        for event in events:
            match event:
                case BlocksStored():
                    changes += self._blocks.store(event.tier, event.hashes, event.parent)
                case Cleared():
                    changes += self._blocks.wipe()
                case BlockRemoved():
                    raise AssertionError("a removal among events that are no removals")
        return changes


def _removed_from(event: PoolEvent) -> Tier | None:
    """The tier of a removal, by which consecutive removals become one fact; None: no removal."""
    return event.tier if isinstance(event, BlockRemoved) else None


class EngineBytesRelay(VirtualRelay):
    """A VirtualRelay with the real relay's code, which gets the scheduler's events as vLLM's bytes.
    Needs sequences with token ids, from which blocks get their names. Slow, and without restarts:
    for tests."""

    def __init__(self, key: WorkerKey, config: SchedulerConfig, now_s: float, **about: Any) -> None:
        """about: as for VirtualRelay."""
        super().__init__(key, config, now_s, **about)
        self._rank = Rank("vllm", self.outbox.epoch, has_replay=False)
        self.outbox = self._rank.outbox
        self._next_seq = 0
        """Sequence number of the engine's next batch of events."""

    @override
    def tell(self, events: Iterable[PoolEvent], now_s: float) -> list[bytes]:
        payload = encode_batch(now_s, list(events), self._config.block_size)
        effects = self._rank.on_message(self._next_seq, payload, now_s)
        while self._rank.state is EngineState.CATCHING_UP:
            effects += self._rank.catch_up(now_s)
        self._next_seq += 1
        return self._published(effects) + self._rank.flush()

    @override
    def beat(self, now_s: float) -> list[bytes]:
        messages = self._rank.beat(now_s)
        self.complete = self._rank.complete
        return messages

    @property
    @override
    def held(self) -> HeldBlocks:
        return self._rank.ledger

    def _published(self, effects: Iterable[RankEffect]) -> list[bytes]:
        self.complete = self._rank.complete
        return [
            message
            for effect in effects
            if isinstance(effect, Publish)
            for message in effect.messages
        ]
