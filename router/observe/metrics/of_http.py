"""Metrics of ports' connections."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.net.listener.connections import Connections
from router.observe.metrics.families import held


def http_metrics(*ports: Connections) -> Iterator[Metric]:
    """Connections of all these ports, open and closed. A registry has one such collector."""
    connections = GaugeMetricFamily(
        "kvroute_http_connections",
        "Connections of HTTP ports: all that are open (open); those without a whole TLS"
        " handshake and a whole head of a request (incomplete); those of the client address"
        " that has most (of_address). Kinds are not for adding up.",
        labels=["port", "kind"],
    )
    closed = CounterMetricFamily(
        "kvroute_http_connections_closed",
        "Connections that an HTTP port closed by itself, by reason (docs/security.md).",
        labels=["port", "reason"],
    )
    for port in ports:
        if port.held is not None:
            yield held("connections", port.held.bytes, port.port)
        connections.add_metric([port.port, "open"], port.open)
        connections.add_metric([port.port, "incomplete"], port.incomplete)
        connections.add_metric([port.port, "of_address"], port.most_of_one)
        for reason, count in sorted(port.closed.items()):
            closed.add_metric([port.port, reason], count)
    yield connections
    yield closed
