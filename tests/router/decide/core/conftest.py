"""Fleets, as most tests of the core begin with them."""

import pytest

from tests.stage.fleet import Fleet


@pytest.fixture
def fleet() -> Fleet:
    """Without a worker."""
    return Fleet()
