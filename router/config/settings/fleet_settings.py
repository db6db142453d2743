"""Settings of the workers that a router knows, and of the index of their blocks."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Settings
from indexer.index import BLOCK_BYTES

TOMBSTONE_S = 60.0
"""Seconds for which a removed worker's heartbeats are ignored, where the command to remove it names
no time: its relay has ended by then."""
TOMBSTONE_MAX_S = 86_400.0
"""Most seconds for which a removed worker's heartbeats are ignored, whatever the command names."""


class FleetNameSettings(Settings, frozen=True):
    """The name of the fleet that a relay or a router belongs to."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-]{1,64}$",
            description="name of the fleet, the same for all its relays and routers",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "default"


class FleetSettings(FleetNameSettings, frozen=True):
    """The fleet of a router: its name, and bounds on the workers that belong to it."""

    workers_max: Annotated[
        int, Meta(ge=1, description="most workers known at once; more are ignored, and counted")
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
            description="file, one for each replica, where the router saves the drains and removals"
            " in force, to apply them after its restart; none: a restarted router learns them from"
            " other replicas only"
        ),
    ] = None


WORKER_PERCENT = 25
"""Percentage of the index's memory that one worker's blocks may take: more than an engine holds, so
that only a broken publisher reaches it, and leaves the other workers three quarters."""
MEMORY_MIB_MAX = 64 << 10
"""Most MiB of the index, 64 GiB: it numbers entries of 16 bytes by 32 bits."""


class IndexSettings(Settings, frozen=True):
    """Memory of the index of the workers' cached blocks."""

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
