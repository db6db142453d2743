"""Metrics of ports' connections."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.net.listener.connections import Connections


class HttpCollector(Collector):
    """Exports the counters of ports' connections. A registry has one of these."""

    def __init__(self, *ports: Connections) -> None:
        self._ports = ports

    @override
    def collect(self) -> Iterator[Metric]:
        connections = GaugeMetricFamily(
            "kvroute_http_connections", "Open connections of HTTP ports.", labels=["port"]
        )
        incomplete = GaugeMetricFamily(
            "kvroute_http_connections_incomplete",
            "Open connections without a whole TLS handshake and a whole head of a request.",
            labels=["port"],
        )
        of_address = GaugeMetricFamily(
            "kvroute_http_connections_of_address",
            "Open connections of the client address that has most.",
            labels=["port"],
        )
        closed = CounterMetricFamily(
            "kvroute_http_connections_closed",
            "Connections that an HTTP port closed by itself, by the bound that they met.",
            labels=["port", "reason"],
        )
        held = GaugeMetricFamily(
            "kvroute_http_held_bytes",
            "Bytes of messages that wait for their handlers, of answers that wait for their peers,"
            " and of open streams, on ports of HTTP/2.",
            labels=["port"],
        )
        for port in self._ports:
            if port.held is not None:
                held.add_metric([port.port], port.held.bytes)
            connections.add_metric([port.port], port.open)
            incomplete.add_metric([port.port], port.incomplete)
            of_address.add_metric([port.port], port.most_of_one)
            for reason, count in sorted(port.closed.items()):
                closed.add_metric([port.port, reason], count)
        yield connections
        yield incomplete
        yield of_address
        yield held
        yield closed
