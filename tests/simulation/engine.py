"""Simulated engines: vLLM's scheduler and cache, its bytes, its sequence and its replay socket.

What an engine really holds is the truth that everything else is held to.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from events.relay.ledger import canonical_block_size
from indexer.hashing import hash_seed
from indexer.identity import Tier, WorkerKey
from indexer.reference import block_hashes, prefix_hashes
from simulator.engines.block_pool import PoolEvent, Stored
from simulator.engines.content import add_tokens
from simulator.engines.scheduler import SchedulerConfig, TokenArray
from simulator.engines.vllm_wire import encode_batch
from simulator.schedulers.vllm.scheduler import VllmScheduler
from tests.simulation.faults import Options

Held = frozenset[tuple[Tier, int]]
"""(tier, PrefixHash) pairs."""

NOTHING: Held = frozenset()
_LORAS = ("ad", "chat")
_SALTS = ("tenant-1", "tenant-2")


class Told(NamedTuple):
    """What an engine held when it sent a message."""

    life: int
    seq: int
    held: Held


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: TokenArray
    lora_name: str
    cache_salt: str


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an engine block stands: its tokens from the root on, and what it gives."""

    token_bytes: bytes
    seed: int
    pages: tuple[int, ...]
    """Engine hashes from the root on."""
    gives: tuple[tuple[int, tuple[int, ...]], ...]
    """PrefixHashes that end here, each with the engine blocks that it takes."""


class Engine:
    """One rank. Its lives share nothing but the prompts that they are asked."""

    def __init__(
        self,
        key: WorkerKey,
        options: Options,
        rng: random.Random,
        send: Callable[[int, bytes], None],
    ) -> None:
        """send: puts a message on the wire, with its sequence number."""
        self.key = key
        self.life = 0
        self.up = False
        self.told_by_digest: dict[int, Told] = {}
        """xxh3 of a payload -> what was true when it was sent; for all lives."""
        self.told = Told(0, -1, NOTHING)
        """What was true with the last message; a reset that is not told yet is not in it."""
        self._options = options
        self._rng = rng
        self._send = send
        self._canonical = canonical_block_size(options.block_tokens, options.canonical_tokens)
        self._config = SchedulerConfig(
            block_count=options.block_count,
            block_size=options.block_tokens,
            max_num_seqs=6,
            step_tokens_max=8 * options.block_tokens,
            hash_seed=rng.getrandbits(32),
            lora_names=_LORAS,
        )
        self._prompts: list[Prompt] = []
        self._places: dict[int, _Place] = {}
        self.boot()

    def boot(self) -> None:
        """Another life: its sequence counts from 0, its cache is empty."""
        self.life += 1
        self.up = True
        self.next_seq = 0
        self._host: OrderedDict[int, None] = OrderedDict()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=self._options.replay_ring_batches)
        self._scheduler = VllmScheduler(self._config)
        self.told = Told(self.life, -1, NOTHING)

    def die(self) -> None:
        self.up = False

    def ask(self, now_s: float, unheard_of: bool = False) -> None:
        """A request comes; one that is unheard of makes the engine speak."""
        prompt = self._prompt()
        if unheard_of:
            size = self._options.block_tokens
            fresh = [self._rng.randrange(1 << 20, 1 << 21) for _ in range(size)]
            prompt = Prompt(np.array(fresh, dtype=np.uint32), "", "")
        room = self._config.model_len - len(prompt.token_ids)
        add_tokens(
            self._scheduler,
            prompt.token_ids,
            min(room, self._rng.choice([1, 1, 4, 3 * self._options.block_tokens])),
            now_s,
            answer=_answer,
            cache_salt=prompt.cache_salt,
            lora_name=prompt.lora_name,
        )

    def reset(self) -> bool:
        """Empties the prefix cache, which is told with the next step; False while it is in use."""
        done = self._scheduler.reset_prefix_cache()
        if done:
            self._host.clear()
        return done

    def step(self, now_s: float) -> None:
        """Computes one step, and publishes what happened."""
        if self._scheduler.begin_step(now_s) is None:
            return
        events = self._scheduler.end_step(now_s).events
        if events:
            options = self._options
            payload = encode_batch(now_s, events, options.block_tokens, self.key.dp_rank)
            self._publish(payload, self._learn(events))
        if self._options.host_blocks:
            self._offload(events, now_s)

    def replay(self, from_seq: int) -> list[tuple[int, bytes]]:
        """What the replay socket still has from a number on."""
        return [one for one in self._ring if one[0] >= from_seq]

    def _publish(self, payload: bytes, held: Held) -> None:
        seq = self.next_seq
        self.next_seq += 1
        self.told = Told(self.life, seq, held)
        self.told_by_digest[xxh3_64_intdigest(payload)] = self.told
        self._ring.append((seq, payload))
        self._send(seq, payload)

    def _offload(self, events: list[PoolEvent], now_s: float) -> None:
        """Copies new blocks to the host, as offload connectors do; the longest there give way."""
        told: list[dict[str, object]] = []
        for event in events:
            if not isinstance(event, Stored):
                continue
            for block in event.hashes:
                on_device = self._scheduler.pool.copies(block)
                if block in self._host or not on_device:
                    continue
                if self._rng.random() >= self._options.offload_share:
                    continue
                if len(self._host) >= self._options.host_blocks:
                    gone, _ = self._host.popitem(last=False)
                    told.append(_host_event("BlockRemoved", gone))
                self._host[block] = None
                told.append(_host_event("BlockStored", block))
        if told:
            payload = msgspec.msgpack.encode([now_s, told, self.key.dp_rank])
            self._publish(payload, self._held())

    def _learn(self, events: list[PoolEvent]) -> Held:
        """What is held now, having learned the names of blocks that are new."""
        for event in events:
            if isinstance(event, Stored):
                self._learn_chain(event)
        return self._held()

    def _learn_chain(self, event: Stored) -> None:
        size = self._options.block_tokens
        parent = self._places[event.parent] if event.parent is not None else None
        salts = [key for key in event.extra_keys[0] or () if key in _SALTS]
        seed = parent.seed if parent else hash_seed(event.lora_name or "", "".join(salts))
        for i, name in enumerate(event.hashes):
            place = self._places.get(name)
            if place is None:
                tokens = np.array(event.token_ids[i * size : (i + 1) * size], "<u4").tobytes()
                before = parent or _Place(b"", seed, (), ())
                place = self._place(
                    before.token_bytes + tokens, seed, (*before.pages, name), len(tokens)
                )
                self._places[name] = place
            parent = place

    def _place(
        self, token_bytes: bytes, seed: int, pages: tuple[int, ...], own_bytes: int
    ) -> _Place:
        size = 4 * (self._canonical or self._options.block_tokens)
        gives = []
        if len(token_bytes) % size == 0:
            chain = prefix_hashes(block_hashes(token_bytes, size // 4, seed)).tolist()
            inside = pages[-max(1, size // own_bytes) :]
            gives = [(prefix, inside) for prefix in chain[-max(1, own_bytes // size) :]]
        return _Place(token_bytes, seed, pages, tuple(gives))

    def _held(self) -> Held:
        pool = self._scheduler.pool
        return frozenset(
            (tier, prefix)
            for tier, names in ((Tier.DEVICE, pool.contents()), (Tier.HOST, self._host.keys()))
            for prefix in self._given(names)
        )

    def _given(self, names: KeysView[int]) -> Iterator[int]:
        for name in names:
            for prefix, pages in self._places[name].gives:
                if all(page in names for page in pages):
                    yield prefix

    def _prompt(self) -> Prompt:
        rng, options = self._rng, self._options
        if self._prompts and rng.random() < options.repeated_share:
            return rng.choice(self._prompts[-6:])
        blocks_max = max(1, min(12, options.block_count - 4))
        whole = rng.randint(1, blocks_max) * options.block_tokens
        length = max(1, whole - rng.choice([0, 0, 1, options.block_tokens // 2]))
        family = rng.randrange(4)
        shared = min(length, rng.randint(0, blocks_max) * options.block_tokens)
        tail = [rng.randrange(1 << 16) for _ in range(length - shared)]
        tokens = np.arange(1000 * family, 1000 * family + length, dtype=np.uint32)
        tokens[shared:] = tail
        prompt = Prompt(
            tokens,
            rng.choice(_LORAS) if rng.random() < options.lora_share else "",
            rng.choice(_SALTS) if rng.random() < options.salt_share else "",
        )
        self._prompts = [*self._prompts[-5:], prompt]
        return prompt


def _host_event(kind: str, block: int) -> dict[str, object]:
    """As vLLM's offload connectors tell: no tokens, no parent."""
    event: dict[str, object] = {"type": kind, "block_hashes": [block]}
    if kind == "BlockStored":
        event |= {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None}
    return event | {"medium": "CPU", "group_idx": 0}


def _answer(prompt: TokenArray, max_tokens: int, lora_name: str) -> TokenArray:
    """An answer that depends on the prompt only, and costs little to make."""
    start = xxh3_64_intdigest(prompt.tobytes() + lora_name.encode()) & 0xFFFFFF
    return np.arange(start, start + max_tokens, dtype=np.uint32)
