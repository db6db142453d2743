"""A guard with other numbers than the product's, for tests of its formula and for tests/bar."""

from router.config.settings.routing_settings import MARGIN, REQUEST_TOKENS, GuardSettings


class TunedGuard(GuardSettings, frozen=True):
    """A guard with numbers of its own."""

    request_tokens: float = REQUEST_TOKENS
    margin: float = MARGIN
