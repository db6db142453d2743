"""What the tests of decoders share."""

import pytest

from events.engines.table import READINGS
from tests.events.engines.encoded import Decode


@pytest.fixture(params=READINGS)
def decode(request: pytest.FixtureRequest) -> Decode:
    """Of each engine."""
    return READINGS[request.param].decode
