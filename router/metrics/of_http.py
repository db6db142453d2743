"""Metrics of HTTP ports' connections."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override


class Connections(Protocol):
    """What a port counts."""

    @property
    def port(self) -> str:
        """Its name."""

    @property
    def open(self) -> int:
        """Open connections."""

    @property
    def closed(self) -> Mapping[str, int]:
        """Bound -> connections that were closed because of it."""


class HttpCollector(Collector):
    """Reads the counters of ports. A registry has one of these."""

    def __init__(self, *ports: Connections) -> None:
        self._ports = ports

    @override
    def collect(self) -> Iterator[Metric]:
        connections = GaugeMetricFamily(
            "kvroute_http_connections", "Open connections of HTTP ports.", labels=["port"]
        )
        closed = CounterMetricFamily(
            "kvroute_http_connections_closed",
            "Connections that an HTTP port closed by itself, by the bound that they met.",
            labels=["port", "reason"],
        )
        for port in self._ports:
            connections.add_metric([port.port], port.open)
            for reason, count in sorted(port.closed.items()):
                closed.add_metric([port.port, reason], count)
        yield connections
        yield closed
