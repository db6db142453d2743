"""Ids of reservations: unique, of one source, and nobody's to guess."""

import os
import random
import re

from router.app.processes.router_process import RouterApp
from router.fleet.reservations.ids import DRAWN, ReservationIds
from tests.stage.loopback import serve_config


def test_ids_name_their_replica_and_never_repeat_across_draws() -> None:
    ids = ReservationIds("router-7.a", random.Random(1).randbytes)
    names = [ids.next() for _ in range(2 * DRAWN + 10)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"router-7\.a-[0-9a-f]{16}", one) for one in names)
    assert {one.rpartition("-")[0] for one in names} == {"router-7.a"}


def test_the_same_source_gives_the_same_ids() -> None:
    one, other = (ReservationIds("r", random.Random(5).randbytes) for _ in range(2))
    assert [one.next() for _ in range(DRAWN + 1)] == [other.next() for _ in range(DRAWN + 1)]


def test_a_router_draws_its_ids_of_the_systems_source_whatever_its_seed() -> None:
    app = RouterApp(serve_config("nats://127.0.0.1:1"), seed=1)
    assert app.core.ids._random_bytes is os.urandom
