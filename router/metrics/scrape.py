"""One scrape of a registry."""

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder


class Scrape:
    """A registry's values at one moment, to be written out apart from the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = list(registry.collect())

    def collect(self) -> list[Metric]:
        return self._families

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The content and its type. accept: the header of the scrape; OpenMetrics, the format with
        exemplars, where the header names it."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type
