"""Events of engines about their KV caches, in one form for all engines and releases.

A decoder (`Reading.decode`, events/engines/engine.py) makes these from an engine's bytes; the
ledger (events/relay/ledger.py) makes facts of them. Hashes are the engine's own. An event is about
one copy of each of its blocks; an engine may hold several, which the ledger counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from indexer.identity import EngineHash


class BlocksStored(Struct, frozen=True):
    """A chain of blocks that the engine stored, after `parent` if there is one."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: Sequence[int]
    """Tokens of these blocks only; empty: absent in the event (an offload to another tier).

    Decoders make it an array('I'), which NumPy takes without a copy.
    """
    block_size: int
    """Tokens of a block of this engine; 0: absent in the event."""
    medium: str | None = None
    """The engine's name of the medium; None (older releases) means GPU."""
    lora_name: str | None = None
    unnamed_lora: bool = False
    """The event has a LoRA's number only, so these blocks could be any LoRA's."""
    cache_salt: str | None = None
    """vLLM: with a chain's first block only; SGLang: with each event."""
    item_ids: tuple[tuple[str, ...], ...] | None = None
    """Ids of the multimodal items in each block; None: no items at all."""
    unhashable: bool = False
    """The blocks depend on content that only the engine has (prompt embeddings)."""
    group: int | None = None
    """KV cache group of a hybrid model."""
    full_attention: bool = True
    """Whether the group decides prefix hits; True for all groups of older releases.

    If False, the block's tokens are left out.
    """
    remote: bool = False
    """Whether the blocks are in a pool that all workers share: on no worker."""


class BlocksRemoved(Struct, frozen=True):
    """One physical copy of each block is gone from a medium."""

    hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group: int | None = None
    remote: bool = False


class BlocksCleared(Struct, frozen=True):
    """The engine dropped all blocks, on all media."""


EngineEvent = BlocksStored | BlocksRemoved | BlocksCleared


class EngineBatch(Struct, frozen=True):
    """The events of one message, in order, and the parts that could not be read."""

    time_s: float
    """Unix time at the engine; 0.0: unreadable."""
    dp_rank: int | None
    """None: absent or unreadable."""
    events: tuple[EngineEvent, ...]
    unknown_kinds: tuple[str, ...] = ()
    """Kind of each event that this release of kvroute doesn't know, cut to 64 characters."""
    removals_lost: bool = False
    """Whether an unreadable event may have been a removal."""
    malformed: tuple[str, ...] = ()
    """Why events were dropped, or the whole batch, or its time or rank; one sentence each."""


@dataclass(slots=True)
class LoadSample:
    """The load of one rank of an engine. None: this engine doesn't report it."""

    running: int = 0
    waiting: int = 0
    used_blocks: float | None = None
    """Blocks held by requests, in the engine's block size, without reclaimable cache."""
    total_blocks: int | None = None
    block_size: int | None = None
    """The engine's own block size, tokens."""
    total_slots: int | None = None
    """Requests that can run at once."""
    preemptions: int = 0
    """Preemptions since the engine started."""
    model: str | None = None
    process_start_s: float | None = None
    """Unix time; a change means that the engine has restarted."""
    asleep: bool = False
    """The engine serves no requests until it is woken up. vLLM's metrics page says so; SGLang's
    pages don't show that its memory is released, and its events clear the cache at once."""
    emptied: bool = False
    """The engine sleeps, and its KV blocks are gone. vLLM keeps them at sleep level 0, a pause."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Further numbers, by their names in events/engines/numbers.py."""
    own_numbers: dict[str, float] = field(default_factory=dict)
    """The operator's own numbers that the page has, by their names in engines.numbers."""
