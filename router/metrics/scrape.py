"""One scrape of a registry."""

from prometheus_client import (
    CollectorRegistry,
    generate_latest,
)
from prometheus_client.core import (
    Metric,
)


class Scrape:
    """A registry's values at one moment, to be written out apart from the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = list(registry.collect())

    def collect(self) -> list[Metric]:
        return self._families

    def text(self) -> bytes:
        return generate_latest(self)
