"""Fixed bounds of the gRPC server, which protect the process and are not configurable."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcBounds:
    """Fixed bounds of the gRPC server; only tests use other values."""

    report_kib_max: int = 1024
    """KiB of a message of Report, at most."""
    other_kib_max: int = 256
    """KiB of a message of a method without prompts, at most."""
    batch_kib_max: int = 16_384
    """KiB of a message of a RouteStream, at most, or 1 MiB more than Route's if that is more."""
    in_flight_mib_max: int = 128
    """MiB of messages over 64 KiB that are handled at once: sixteen of Route's longest."""
    streams_max: int = 8192
    """Open calls of one connection: twice as many as wait by default (queue.max_waiting), since a
    gateway may be the router's one client."""
    metadata_kib_max: int = 16
    """KiB of a call's metadata, at most: a token of an issuer takes a few KiB."""
    read_timeout_s: float = 20.0
    """Seconds in which a client must take a message of a stream's results."""
    keepalive_s: float = 60.0
    """Seconds of silence after which a client gets a keepalive ping."""
    age_s: float = 300.0
    """Seconds after which a connection is closed, so that clients spread over the replicas again:
    soon after a rollout, and seldom enough to cost nothing."""
    age_grace_s: float = 60.0
    """Seconds for which calls on a connection past its age may go on; streams end by themselves in
    that time (stream_age_s)."""

    @property
    def stream_age_s(self) -> float:
        """Age in seconds at which a stream ends. It is less than a connection's grace, which may
        begin right after the stream opened, so that the end of a connection breaks no stream.
        """
        return 0.8 * self.age_grace_s


GRPC_BOUNDS = GrpcBounds()
