"""Twenty seconds of chaos: the laws that have no times in them, on a fleet half the size.

`make chaos` has the other laws, and ten minutes. The times are asserted in virtual time.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.laws import judge
from tests.chaos.report import table
from tests.chaos.run import Times, run
from tests.chaos.schedule import Sizes
from tests.chaos.stage import Options

SEED = 12
OPTIONS = Options(
    seed=SEED,
    sizes=Sizes(workers=4, wired=1, well=2, routers=2, clients=1),
    relays=2,
    rate=40.0,
    first_byte_s=10.0,
    route_s=30.0,
    lease_s=5.0,
    engine_blocks=512,
)
TIMES = Times(warm_up=2.0, faults=14.0, every=0.8, longest=3.0, mended=1.0, waits=False)


@pytest.mark.parametrize("tls", [False, True], ids=["plain text", "TLS and tokens"])
async def test_faults_end_no_process_leave_nothing_open_and_an_index_that_is_exact(
    tmp_path: Path, tls: bool
) -> None:
    options = replace(OPTIONS, tls=tls)
    observed = await run(options, TIMES, tmp_path, lambda text: sys.stdout.write(text + "\n"))
    verdicts = [one for one in judge(observed) if not one.timed]
    sys.stdout.write(table(observed, verdicts, f"SEED={SEED}, {options}, {TIMES}"))
    assert [one.law for one in verdicts if not one.holds] == []
    assert all(one.looked for one in verdicts)
