"""The stand-in engine that fails: each fault is still in the road of a request."""

from tests.scraped import engines
from tests.stage.overrides import without_base


def test_every_fault_replaces_a_method_that_there_is() -> None:
    assert without_base(engines) == []
