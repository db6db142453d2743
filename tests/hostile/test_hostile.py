"""Under each attack every call of a good client is answered."""

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.good import table
from tests.hostile.stage import a_server, calls_for, under_attack

SEED = 17
SECONDS = 3.0


@pytest.mark.parametrize("name", ATTACKS)
async def test_every_call_of_a_good_client_is_answered(name: str) -> None:
    async with a_server() as (ports, good):
        usual = await calls_for(good, 1.0)
        under, opened = await under_attack(ports, good, name, SEED, SECONDS)
        after = await calls_for(good, 0.0)
    print(f"seed {SEED}, {opened}", table([(name, usual, under)]), sep="\n")  # noqa: T201
    assert opened, "the attack has connections"
    assert usual.failures == under.failures == after.failures == []
    assert all(under.seconds.values()), "each face was called"
