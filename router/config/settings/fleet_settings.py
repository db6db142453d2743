"""Settings of the workers that a router knows, and of the index of their blocks."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Settings
from indexer.index import BLOCK_BYTES

TOMBSTONE_S = 60.0
"""Seconds for which a removed worker's beats are ignored, where the command names no time: its
relay has ended by then, or its operator stops it."""
TOMBSTONE_MAX_S = 86_400.0
"""Longest time that a removed worker's beats are ignored, whatever the command says."""


class FleetNameSettings(Settings, frozen=True):
    """The fleet of a relay."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-]{1,64}$",
            description="name of the fleet, the same for all its relays and routers",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "default"


class FleetSettings(FleetNameSettings, frozen=True):
    """The fleet of a router, and what is known of it."""

    workers_max: Annotated[
        int, Meta(ge=1, description="workers known at once; more are ignored, and counted")
    ] = 4096
    register_networks: Annotated[
        str,
        Meta(
            description="networks of engines that the RPC RegisterWorker may name, by IP address:"
            " CIDRs with commas between; empty: RegisterWorker is off",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
    state_file: Annotated[
        str | None,
        Meta(
            description="file where this router saves the drains and removals in force for its"
            " restart, one for each replica; none: a restarted router learns them from"
            " other replicas only"
        ),
    ] = None


WORKER_PERCENT = 25
"""Percentage of the index's memory that one worker's blocks may take: more than an engine holds, so
that only a broken publisher meets it, and leaves the other workers three quarters."""
MEMORY_MIB_MAX = 64 << 10
"""MiB of the index, at most: its entries have 32-bit places, which are too few for more than 16
bytes * 2^32."""


class IndexSettings(Settings, frozen=True):
    """The overlap index."""

    memory_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=MEMORY_MIB_MAX,
            description="MiB of memory that the index of cached blocks may take; when it is"
            " full, blocks that no prompt matched lately are forgotten",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = 4096

    def bytes_max(self) -> int:
        return self.memory_mib << 20

    def blocks_max(self) -> int:
        """Most blocks of one worker that the index holds."""
        return self.bytes_max() * WORKER_PERCENT // 100 // BLOCK_BYTES
