"""What the laws say of rounds, and where other bounds hold."""

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.good import Calls
from tests.hostile.verdict import KEPT_MIB, RATIOS, Rounds


def rounds(
    name: str, *, kind: str = "metrics", ratio: float = 1.0, after_mib: float = 100
) -> Rounds:
    """Of an attack on a server of 100 MiB, one round."""
    usual, under = Calls({kind: [0.1]}), Calls({kind: [0.1 * ratio]})
    return Rounds(name, [usual], [under], 1.0, 100.0, after_mib)


@pytest.mark.parametrize(
    ("played", "holds"),
    [
        (rounds("pings", ratio=1.9, after_mib=109), True),
        (rounds("pings", ratio=2.1), False),
        (rounds("pings", after_mib=111), False),
        (rounds("unread", ratio=3.9), True),
        (rounds("unread", ratio=4.1), False),
        (rounds("unread", kind="probes", ratio=2.1), False),
        (rounds("streams", after_mib=249), True),
        (rounds("streams", after_mib=251), False),
    ],
)
def test_a_law_is_broken_past_its_bound(played: Rounds, holds: bool) -> None:
    assert (played.broken() == []) is holds


def test_exceptions_are_of_attacks_that_there_are() -> None:
    assert RATIOS.keys() | KEPT_MIB.keys() <= ATTACKS.keys()
