"""Certificates, callers' keys and engines' keys of one router, and the checks of its listeners."""

from events.plane.clock import unix_now
from router.config.settings.configurations import ServeConfig
from router.gateway.server.server import check_address
from router.net.keys.certificates import Certificates, Contexts, metrics_tls
from router.net.keys.door import Door
from router.net.keys.exposure import check_exposure, split_address
from router.net.keys.followed import Followed
from router.net.keys.networks import networks_of


class Locks:
    """The certificates and keys of one router."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError for unreadable files, an invalid address to listen on, and a listener
        that a network can reach without keys, unless its key any_address allows it."""
        self.followed = Followed()
        """Follows files of keys and certificates, which are read again as they change."""
        self.certificates = Certificates.of(config.tls)
        if self.certificates is not None:
            self.followed.add("certificates", self.certificates)
        self.networks = networks_of(config.fleet.register_networks)
        self.door = Door.of(config.keys, self.certificates, clock=unix_now)
        if self.door is not None:
            self.door.follow(self.followed)
        keyed = self.door is not None
        grpc = config.grpc
        for key, listen in (
            ("picker.listen", config.picker.listen),
            ("metrics.listen", config.metrics.listen),
            ("probes.listen", config.probes.listen),
        ):
            if listen:
                split_address(listen, key)
        split_address(grpc.listen, "grpc.listen")
        check_exposure(
            grpc.listen,
            key="grpc.listen",
            guarded=keyed,
            switch="grpc.any_address",
            allowed=grpc.any_address,
        )
        if config.gateway.listen:
            check_address(config.gateway, keyed)
        self.metrics_tls: Contexts | None = metrics_tls(config.metrics, self.certificates)
