"""A kind of engine, as one record: all that kvroute must know of it. Pure.

The records are in table.py. What differs between engines is a field of this record; no other module
compares an engine's name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from events.engines.events import EngineBatch, LoadSample
from events.engines.pages.load import EngineIdentity

Loads = Mapping[int, LoadSample]
"""Rank -> its load."""
ReadLoadFeed = Callable[[bytes, int], tuple[int, LoadSample]]
"""(payload of the feed, block size in tokens) -> (rank, load); raises LoadUnreadable."""
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IdentityPage:
    """An HTTP page of an engine that gives its identity, such as model and version."""

    path: str
    required: bool = False
    """Whether an engine without the page has no identity; False: some releases lack the page."""
    changes: bool = False
    """Whether it is read every few seconds, since LoRA adapters come and go; False: IDENTITY_S of
    events/relay/engine_pages.py."""


@dataclass(frozen=True, slots=True)
class LoadPage:
    """An HTTP page with an engine's load."""

    path: str
    read: Callable[[bytes, int | None], Loads]
    """(page, block size of the identity in tokens) -> the load; raises LoadUnreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a relay reads an engine's events and pages."""

    decode: Callable[[bytes], EngineBatch]
    """A ZMQ payload -> its events; never raises, for any bytes (events/engines/wire.py)."""
    identity_pages: tuple[IdentityPage, ...]
    """The pages with the engine's identity, required ones first."""
    read_identity: Callable[..., EngineIdentity]
    """Bytes of the identity pages, in their order, None for a missing page -> the identity; raises
    LoadUnreadable."""
    load_pages: tuple[LoadPage, ...]
    """The pages with the engine's load; the first that the engine has is read."""
    metrics_path: str = "/metrics"
    """Path of its page of Prometheus metrics, which is one of its load pages."""
    rank_label: str = "dp_rank"
    """Label that has the rank in the samples of the metrics page."""
    loads_need_identity: bool = False
    """Whether loads are in tokens, so that the block size must be known first."""
    read_load_feed: ReadLoadFeed | None = None
    """Reads the engine's feed of loads over ZMQ; None: it has none."""


class HandOver(Enum):
    """How a prompt's blocks are moved from a prefill engine to a decode engine."""

    IN_TURN = "in turn"
    """The prefill engine's answer says where the blocks are; the decode request has that answer
    (kv_transfer_params). Any engine with a connector can do either half."""
    AT_ONCE = "at once"
    """Both requests go out together, and meet at the prefill engine's bootstrap server. An engine
    is started for one half, or for whole requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A kind of engine. The defaults are used for an unknown kind."""

    name: str
    """The name in settings, heartbeats, answers and metrics."""
    title: str
    """The name in sentences."""
    reading: Reading | None = None
    """How a relay reads the engine; None: no relay reads it."""
    owned_by: str = ""
    """`owned_by` of its models in /v1/models, by which discovery knows it."""
    first_version: Version = ()
    """The first release whose events kvroute was tried with; (): any."""
    salts_since: Version | None = ()
    """The first release whose events have cache salts; (): all of them; None: none."""
    names_items: bool = True
    """Whether its events name the images and the like that are in a block."""
    ranks_numbered: bool = True
    """Whether each rank's events have its number; False: some configurations number all of them
    0."""
    lower_priority_first: bool = False
    """Whether a request with a lower priority is served sooner, unless the identity says so."""
    lora_field: str = ""
    """The field of a request that names a LoRA; empty: its field `model`."""
    hand_over: HandOver | None = None
    """None: it takes no part in pairs of prefill and decode workers."""
    decode_caches: bool = True
    """Whether decode workers keep a prefix cache, and publish events of it."""
    unpaired_bodies: frozenset[str] = frozenset()
    """Names of the body formats (router/request/bodies.py) in which it drops the fields by which
    the two engines of a pair transfer a prompt's blocks."""
    chat_tokens: Callable[[Sequence[int]], dict[str, Any]] | None = None
    """Token ids -> fields of a chat's body by which the engine computes these tokens instead of
    rendering the messages, and still answers as to a chat. None: it has no such field."""
    eagle_shifts_hashes: bool = False
    """Whether with EAGLE its block hashes cover a token more than a block, and can't be matched."""

    def tells_salts(self, version: str) -> bool:
        """Whether this release's events have cache salts; True for an unknown version."""
        return self.salts_since is not None and not _is_before(version, self.salts_since)

    def is_untried(self, version: str) -> bool:
        """Whether a release is older than every one that kvroute was tried with."""
        return _is_before(version, self.first_version)


def _is_before(version: str, first: Version) -> bool:
    numbers = tuple(map(int, re.findall(r"\d{1,9}", version)[:3]))
    return bool(numbers) and numbers < first
