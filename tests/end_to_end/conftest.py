"""What the tests of whole fleets share."""

import pytest

from events.plane import nats_client


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is silent for 2 s is not given up: on a busy machine it has had no turn, and
    what is sent until a connection is made again reaches nobody."""
    monkeypatch.setattr(nats_client, "PING_S", 30.0)
