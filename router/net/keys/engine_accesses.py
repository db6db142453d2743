"""Credentials with which one process calls engines: an API key and a CA for all engines, and those
of workers that have their own.

Law: the gateway, relays, warmers and calls for tokens all get an engine's credentials here.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Self

from events.engines.access import Credentials, EngineAccess
from events.plane.settings import EngineSettings
from router.config.keys import ConfigError
from router.config.settings.gateway_settings import GatewaySettings
from router.config.settings.keys_settings import EnginesSettings
from router.net.keys.followed import reason_of

log = logging.getLogger("kvroute")


class EngineAccesses:
    """The credentials of one process for its engines: the shared ones, and those of single
    workers.
    """

    def __init__(self, settings: EnginesSettings | None = None) -> None:
        """Raises OSError or ValueError for files that can't be used."""
        self.settings = settings = settings or EnginesSettings()
        self._default = Credentials(settings.api_key_file, settings.ca_file)
        self.on_model_missing: Callable[[str], None] = lambda _: None
        """Called with the id of a worker whose engine answered as if it lacked a model."""
        self._own: dict[str, Credentials] = {}
        """Credentials by worker id, of workers that have their own."""

    @classmethod
    def of(
        cls,
        settings: EnginesSettings,
        gateway: GatewaySettings | None = None,
        workers: Iterable[EngineSettings] = (),
    ) -> Self:
        """Makes the configured accesses; raises ConfigError for files that can't be used. workers:
        those whose files are checked now.
        """
        if gateway is not None and gateway.pass_keys and settings.api_key_file:
            raise ConfigError(
                "set one of the two: engines get either their own key or those of clients"
                " - at `$.engines.api_key_file`, `$.gateway.pass_keys`"
            )
        try:
            accesses = cls(settings)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{reason_of(error)} - at `$.engines.api_key_file`, `$.engines.ca_file`"
            ) from None
        if settings.api_key_file:
            log.info("engines are called with the API key of engines.api_key_file")
        for worker in workers:
            try:
                accesses.of_engine(worker)
            except (OSError, ValueError) as error:
                raise ConfigError(f"worker {worker.id!r}: {reason_of(error)}") from None
        return accesses

    def of_engine(self, worker: EngineSettings) -> EngineAccess:
        """The access of a worker whose relay runs here, which all callers use from now on. Raises
        OSError or ValueError, and changes nothing, for files that can't be used.
        """
        if worker.api_key_file is not None or worker.ca_file is not None:
            settings = self.settings
            self._own[worker.id] = Credentials(
                worker.api_key_file or settings.api_key_file,
                worker.ca_file or settings.ca_file,
            )
        else:
            self.forget(worker.id)
        return self.of_worker(worker.id, worker.http or worker.address)

    def of_worker(self, worker_id: str, base: str) -> EngineAccess:
        """The access of a worker, at this base URL."""
        return EngineAccess(base, self._own.get(worker_id, self._default))

    def forget(self, worker_id: str) -> None:
        """Forgets the access of a worker whose relay has ended for good."""
        self._own.pop(worker_id, None)

    def reload(self) -> bool:
        """Reads the files of all credentials again; returns whether any changed. Raises ValueError
        for files that can't be used; the other files are read all the same."""
        changed, failed = False, []
        for credentials in (self._default, *self._own.values()):
            try:
                changed |= credentials.reload()
            except (OSError, ValueError) as error:
                failed.append(reason_of(error))
        if failed:
            raise ValueError("; ".join(failed))
        return changed
