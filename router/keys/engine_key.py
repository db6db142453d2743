"""The API key that a gateway shows to engines, as its file holds it now.

Law: the key is in no log, metric or error.
"""

from router.config.keys import ConfigError
from router.config.settings.gateway_settings import GatewaySettings
from router.keys.followed import reason_of
from router.keys.issuers import read_token


class EngineKey:
    """Of one gateway."""

    def __init__(self, file: str) -> None:
        """Raises OSError or ValueError."""
        self._file = file
        self.value = read_token(file)

    @classmethod
    def of(cls, settings: GatewaySettings) -> "EngineKey | None":
        """As configured; None: engines get what clients send. Raises ConfigError."""
        if settings.engine_key_file is None:
            return None
        if settings.pass_keys:
            raise ConfigError(
                "engines get either the gateway's key or its clients'"
                " - at `$.gateway.engine_key_file`, `$.gateway.pass_keys`"
            )
        try:
            return cls(settings.engine_key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{reason_of(error)} - at `$.gateway.engine_key_file`") from None

    def reload(self) -> bool:
        """See Readable."""
        value = read_token(self._file)
        changed, self.value = value != self.value, value
        return changed
