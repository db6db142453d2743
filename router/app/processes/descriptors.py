"""Raises the process's limit of open files, and checks that it is enough.

Law: a program that runs until it is stopped raises its soft limit of open files to the hard one
before it listens, and warns where the hard one is below what its ports and engines may need.
"""

import logging
import resource

from events.plane.settings import Settings
from router.app.processes.risks import Values

OTHERS = 256
"""Open files beside clients' and engines' connections: NATS, relays, files, child processes."""
PORTS = ("grpc.listen", "picker.listen", "gateway.listen", "metrics.listen", "probes.listen")
"""Keys of addresses to listen on, each of which takes http.connections_max connections."""
_UNLIMITED = 10_240
"""Soft limit where the hard one is unlimited: macOS takes no more than this (OPEN_MAX)."""

log = logging.getLogger("kvroute")


def raise_limit(config: Settings) -> None:
    """Raises this process's limit of open files, and warns where it is lower than `wanted_by`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            most = _UNLIMITED
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    wanted = wanted_by(config)
    if most != resource.RLIM_INFINITY and most < wanted:
        log.warning(
            "this process may open %d files (ulimit -Hn), but its ports and engines may need %d:"
            " raise the hard limit, or lower http.connections_max or gateway.open_max",
            most,
            wanted,
        )


def wanted_by(config: Settings) -> int:
    """Number of files that a process with this configuration may have open at once."""
    values = Values(config)
    ports = int(values["http.connections_max"]) * sum(bool(values[listen]) for listen in PORTS)
    engines = int(values["gateway.open_max"]) if values["gateway.listen"] else 0
    return OTHERS + ports + engines
