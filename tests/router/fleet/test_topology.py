"""Distances between workers, by their labels."""

import numpy as np

from router.fleet.topology import Topology


def place(host: str = "", rack: str = "", cluster: str = "") -> dict[str, str]:
    named = {"host": host, "rack": rack, "cluster": cluster}
    return {name: value for name, value in named.items() if value}


FLEET = Topology(
    [
        place("h1", "r1", "c1"),
        place("h1", "r1", "c1"),
        place("h2", "r1", "c1"),
        place("h3", "r2", "c1"),
        place("h4", "r3", "c2"),
        place(),
        place(),
        place("h2"),
    ]
)


def test_a_host_is_nearer_than_a_rack_and_a_rack_than_a_cluster() -> None:
    assert [FLEET.between(0, other) for other in range(6)] == [0, 0, 1, 2, 3, 3]


def test_a_worker_without_labels_is_near_to_nobody_but_itself() -> None:
    assert [FLEET.between(5, other) for other in (5, 6, 0)] == [0, 3, 3]


def test_one_label_is_enough() -> None:
    assert FLEET.between(7, 2) == 0
    assert FLEET.between(7, 0) == 3


def test_the_mean_goes_over_the_targets() -> None:
    targets = np.zeros(8, np.bool_)
    targets[[0, 1, 4]] = True
    # from the first: 0, 0, 3; from the third: 1, 1, 3; from the fourth: 2, 2, 3; the fifth: 3, 3, 0
    assert FLEET.mean_distance(targets)[:5].tolist() == [1, 1, 5 / 3, 7 / 3, 2]


def test_without_targets_nobody_is_far() -> None:
    assert FLEET.mean_distance(np.zeros(8, np.bool_)).tolist() == [0] * 8


def test_nobody() -> None:
    assert Topology([]).mean_distance(np.zeros(0, np.bool_)).tolist() == []
