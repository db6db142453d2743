"""Settings of the workers that a router knows, and of the index of their blocks."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Seconds, Settings
from indexer.index import BLOCK_BYTES

TOMBSTONE_MAX_S = 86_400.0
"""Longest time that a removed worker's beats are ignored, by configuration or command."""


class FleetSettings(Settings, frozen=True):
    """When workers count as there."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="the workers one router serves"),
    ] = "default"
    beat_timeout_s: Annotated[
        Seconds, Meta(description="silence after which a worker gets no requests")
    ] = 3.0
    forget_s: Annotated[Seconds, Meta(description="silence after which it is forgotten")] = 30.0
    model_memory_s: Annotated[
        Seconds, Meta(description="how long a model without workers is UNAVAILABLE, not NOT_FOUND")
    ] = 300.0
    tombstone_s: Annotated[
        float,
        Meta(
            gt=0,
            le=TOMBSTONE_MAX_S,
            description="how long a removed worker's beats are ignored, a day at most",
        ),
    ] = 60.0
    workers_max: Annotated[int, Meta(ge=1, description="workers known at once")] = 4096
    state_file: Annotated[
        str | None,
        Meta(
            description="file that keeps the drains and removals in force for restarts of this"
            " router, another file for each replica; none: only other replicas tell them"
        ),
    ] = None
    inflight: Annotated[
        bool,
        Meta(description="tell other replicas what is reserved here, and count what they tell"),
    ] = True


MEMORY_MIB_MAX = 64 << 10
"""Of the index: its entries have 32-bit places, which are too few for more than 16 bytes * 2^32."""


class IndexSettings(Settings, frozen=True):
    """The overlap index."""

    memory_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=MEMORY_MIB_MAX,
            description="over it, blocks that no prompt asks for are forgotten; 64 GiB at most",
        ),
    ] = 4096
    worker_percent: Annotated[
        int, Meta(ge=1, le=100, description="of the memory that one worker's blocks may take")
    ] = 25

    def bytes_max(self) -> int:
        return self.memory_mib << 20

    def blocks_max(self) -> int:
        """Of one worker."""
        return self.bytes_max() * self.worker_percent // 100 // BLOCK_BYTES
