"""Tests of the service that hold on each of its two gRPC ports."""

import pytest

from tests.stage import served


@pytest.fixture(params=["listen", "fast_listen"])
def each_port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs twice: calls go to grpc.listen, then to grpc.fast_listen."""
    port: str = request.param
    monkeypatch.setattr(served, "ON_FAST_PORT", port == "fast_listen")
    return port
