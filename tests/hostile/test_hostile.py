"""Under each attack every call of a good client is answered.

`make hostile` measures times and memory, too.
"""

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.stage import staged

SEED = 17
SECONDS = 3.0


@pytest.mark.parametrize("name", ATTACKS)
async def test_every_call_of_a_good_client_is_answered(name: str) -> None:
    print(f"seed {SEED}")  # noqa: T201
    async with staged(name) as stage:
        usual = await stage.calls(2.0)
        under, opened = await stage.calls_under(name, SEED, SECONDS)
        after = await stage.calls(0.0)
    assert opened, "the attack has connections"
    assert usual.failures == under.failures == after.failures == []
    assert all(under.seconds.values()), "each port was called"
