"""An interrupted `make results` goes on where it stopped, and plays again what would differ."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from simulator.study.comparison import Traffic
from simulator.traffic.trace import Trace, TraceRequest
from tests.results.cases import Case, Results, run_all
from tests.results.fleets import fleet
from tests.results.kept import CODES_MAX, Kept
from tests.stage.code_digest import PACKAGES, code_digest


def traffic(output_tokens: int = 4) -> Traffic:
    def request(place: int) -> TraceRequest:
        hash_ids = np.array([0, place], np.uint64)
        return TraceRequest(float(place), 1000, output_tokens, hash_ids)

    return Traffic(trace=Trace("small", tuple(request(place) for place in range(6))))


def case(name: str, policy: str, traffic: Traffic, rate: float = 1.0) -> Case:
    return Case("section", name, traffic, rate, fleet(policy, workers=2))


def cases() -> list[Case]:
    shared = traffic()
    return [
        case("one", "round-robin", shared),
        case("one", "ttft", shared),
        case("the same by another name", "ttft", shared),
        case("one", "ttft", shared, rate=2.0),
    ]


def played(folder: Path, code: str = "code") -> tuple[Results, str]:
    """The results and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    results = run_all(cases(), 1, console, Kept(folder, code))
    return results, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.long
def test_only_runs_that_did_not_end_are_played_and_come_out_as_before(tmp_path: Path) -> None:
    first, _ = played(tmp_path)
    files = sorted((tmp_path / "code").iterdir())
    assert len(files) == 3, "two cases share a run"
    kept = Kept(tmp_path, "code")
    lost = next(one for one in cases() if one.options.policy == "round-robin")
    (tmp_path / "code" / kept.name(lost.traffic, lost.rate, lost.options)).unlink()
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "code").iterdir()}

    second, text = played(tmp_path)
    assert text.count("kept") == 2
    assert sorted((tmp_path / "code").iterdir()) == files
    for name, at_ns in before.items():
        assert (tmp_path / "code" / name).stat().st_mtime_ns == at_ns
    for key, done in first.items():
        again = second[key]
        assert again.case.key == key
        assert again.result.digest == done.result.digest
        assert again.ceiling == done.ceiling
        assert replace(again.numbers, wall_s=0.0) == replace(done.numbers, wall_s=0.0)


def test_a_run_cut_off_while_it_was_written_is_no_run(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "code")
    name = kept.name(traffic(), 1.0, fleet("ttft"))
    (tmp_path / "code" / f"{name}.unfinished").write_bytes(b"half")
    assert kept.read(name) is None


def test_a_run_is_named_after_all_that_decides_it(tmp_path: Path) -> None:
    kept, shared, options = Kept(tmp_path, "code"), traffic(), fleet("ttft")
    name = kept.name(shared, 1.0, options)
    assert kept.name(traffic(), 1.0, fleet("ttft")) == name
    others = [
        kept.name(traffic(output_tokens=5), 1.0, options),
        kept.name(replace(shared, tick_s=0.0), 1.0, options),
        kept.name(shared, 2.0, options),
        kept.name(shared, 1.0, fleet("ttft", blocks=64)),
        kept.name(shared, 1.0, fleet("ttft", parameters={"ttft": {"keep": 2.0}})),
        kept.name(shared, 1.0, replace(options, seed=1)),
    ]
    assert len({name, *others}) == 1 + len(others)


def test_other_code_plays_its_own_runs_and_the_oldest_are_removed(tmp_path: Path) -> None:
    for place in range(CODES_MAX + 1):
        kept = Kept(tmp_path, f"code {place}")
        assert kept.read("run") is None
        (tmp_path / f"code {place}" / "run").write_bytes(b"")
        os.utime(tmp_path / f"code {place}", (place, place))
    Kept(tmp_path, "code 0")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["code 0", "code 2", "code 3"]


def test_runs_that_are_forgotten_are_played_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "code")
    (tmp_path / "code" / "run").write_bytes(b"")
    kept.forget()
    assert kept.read("run") is None


def test_the_code_is_what_the_packages_say_and_no_page_or_built_file(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    before = code_digest(tmp_path)
    (tmp_path / "router" / "README.md").write_text("a page")
    (tmp_path / "router" / "ranking.so").write_text("built")
    assert code_digest(tmp_path) == before
    (tmp_path / "router" / "core.py").write_text("x = 1")
    changed = code_digest(tmp_path)
    (tmp_path / "router" / "core.py").write_text("x = 2")
    assert len({before, changed, code_digest(tmp_path)}) == 3
