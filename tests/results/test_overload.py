"""The study of the queue under overload, on a few seconds of its traffic."""

import numpy as np
import pytest

from simulator.traffic.results import Outcome
from tests.results.overload import (
    BANDS,
    BEGIN,
    END,
    PAGE,
    SETUPS,
    TENANTS,
    play,
    tables,
    traffic,
    written,
)


def test_the_traffic_has_the_bands_tenants_and_arrivals_that_the_page_names() -> None:
    requests = traffic(100.0, 60.0, 3).requests
    assert len(requests) == pytest.approx(6000, rel=0.05)
    for band in BANDS:
        of_band = [one for one in requests if one.priority == band.priority]
        assert len(of_band) / len(requests) == pytest.approx(band.share, abs=0.06)
        assert {one.ttft_slo_s for one in of_band} == {band.slo_s}
    tenants = {one.tenant for one in requests}
    assert tenants == {f"tenant-{number + 1}" for number in range(TENANTS)}
    greedy = sum(one.tenant == "tenant-1" for one in requests) / len(requests)
    assert greedy == pytest.approx(0.4, abs=0.06)


def test_dynamos_fcfs_is_our_default_and_its_wspt_looks_at_uncached_tokens_alone() -> None:
    ours, theirs, wspt = (play(name, 12.0, 8.0, 0) for name in ("priority", *list(SETUPS)[-2:]))
    assert ours is not None
    assert theirs is not None
    assert wspt is not None
    assert ours.result.digest == theirs.result.digest != wspt.result.digest
    assert (wspt.result.outcome == Outcome.SERVED).all()
    text = tables({"ours": ours, "theirs": theirs, "lpm": None}, 12.0, 8.0, 0)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| ours", "| the"))]
    assert len(rows) == 4
    assert rows[0][1:] == rows[1][1:]
    assert "Not played, since the simulator's router refused them: lpm." in text


def test_tables_replace_what_is_between_the_marks_of_the_page() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert written(page, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert written(written(page, "new\n"), "new\n") == written(page, "new\n")
    with pytest.raises(ValueError, match="the page has no"):
        written("nothing", "new")
    assert BEGIN in PAGE.read_text(encoding="utf-8")


def test_every_setup_has_another_queue() -> None:
    assert len({repr(queue) for queue in SETUPS.values()}) == len(SETUPS)
    assert np.isclose(sum(band.share for band in BANDS), 1.0)
