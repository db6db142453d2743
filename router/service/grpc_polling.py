"""How gRPC's core works in a process of ours; said before the process first uses it.

Its settings are environment variables, which a user's own values win over.
"""

from collections.abc import MutableMapping

EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""Sockets are polled by the thread that completions come to. With the event engine, which is the
core's default, each read crosses one thread more: measured with grpcio 1.85 on two cores, a message
of a stream took 103 us of CPU and not 63, a call came back after 345 us and not 476."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Settings for a process that does nothing with gRPC but serve and call."""
    # Children are started by exec and never use gRPC: its fork handlers complain of each, and now
    # and then hang one between fork and exec.
    environment.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    environment.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)
