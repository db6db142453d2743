"""What engines tell about their KV caches, in one form for all engines and versions.

A decoder (events/engines/decoding.py) makes these from an engine's bytes; the ledger
(events/relay/ledger.py) makes facts of them. Nothing here is hashed or counted yet: engine hashes
are the engine's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.identity import EngineHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks that the engine now holds, after `parent` if there is one."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: Sequence[int]
    """Tokens of these blocks only; empty when the engine tells none (an offload to another tier).

    Decoders make it an array('I'), which NumPy takes as it is.
    """
    block_size: int
    """Tokens a block, in this engine; 0 when it tells none."""
    medium: str | None = None
    """As the engine names it; None (older versions) means GPU."""
    lora_name: str | None = None
    unnamed_lora: bool = False
    """A LoRA is told by number only, so these blocks can't be told from another LoRA's."""
    cache_salt: str | None = None
    """Told with a chain's first block only (vLLM), or with each event (SGLang)."""
    item_ids: tuple[tuple[str, ...], ...] | None = None
    """For each block, the ids of the multimodal items in it; None: no items at all."""
    unhashable: bool = False
    """The blocks depend on something whose content nobody outside can know (prompt embeddings)."""
    group: int | None = None
    """KV cache group of a hybrid model."""
    full_attention: bool = True
    """Whether the group decides prefix hits; older versions don't say, and all do.

    When it does not, the block's tokens are left out.
    """
    remote: bool = False
    """In a pool that all workers share: nobody's residency."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One physical copy of each block is gone from a medium."""

    hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group: int | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The engine holds nothing any more, on any medium."""


EngineEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The events of one message, in order, and what could not be read of it."""

    time_s: float
    """Unix time at the engine; 0.0 when unreadable."""
    dp_rank: int | None
    """None: the engine didn't say."""
    events: tuple[EngineEvent, ...]
    unknown_kinds: tuple[str, ...] = ()
    """Kinds of event that this version of kvroute doesn't know, once each time they came; cut to 64
    characters."""
    removals_lost: bool = False
    """What could not be read may have been a removal."""
    malformed: tuple[str, ...] = ()
    """Why events were dropped, or the whole batch, or its time or rank; one sentence each."""


@dataclass(slots=True)
class LoadSample:
    """What one rank of an engine tells about its load. None: this engine doesn't tell."""

    running: int = 0
    waiting: int = 0
    used_blocks: float | None = None
    """Blocks held by requests, in the engine's block size; reclaimable cache is not in it."""
    total_blocks: int | None = None
    block_size: int | None = None
    """The engine's own, tokens."""
    total_slots: int | None = None
    """Requests that can run at once."""
    preemptions: int = 0
    """Since the engine started."""
    waiting_prefill_tokens: int | None = None
    model: str | None = None
    process_start_s: float | None = None
    """Unix time: a change means another life of the engine."""
    extras: dict[str, float] = field(default_factory=dict)
