"""What the page takes from elsewhere: presets' settings, and the runs of the bar."""

import json
from pathlib import Path

import pytest

from router.config.settings.presets import PRESETS
from router.config.settings.routing_settings import GuardSettings
from tests.bar.cases import CASES
from tests.bar.judge import CHOICE_SEEDS, GUARDED, OTHERS
from tests.bar.runs import Run
from tests.results import bar, grid, presets
from tests.results.fleets import FILES, RATES, Traces, fleet
from tests.results.kept import Kept

GUARD = f"{GuardSettings().request_tokens:g}/{GuardSettings().margin:g}"
LOST, HELD, UNPLAYED = list(CASES)[:3]


def kept_runs(
    case: str, ttft_ms: dict[str, float], chosen_ms: dict[str, float] | None = None
) -> dict[str, list[float]]:
    """Five seeds around a mean time to first token, 100 ms unless it is given; and those by which
    the best policy is chosen, around chosen_ms."""
    choice = dict.fromkeys(range(5, 5 + CHOICE_SEEDS), chosen_ms or ttft_ms)
    return {
        Run(case, policy, seed, GUARD if policy in GUARDED else "").key: [
            choice.get(seed, ttft_ms).get(policy, 100.0) + seed - 2,
            500.0,
            0.5,
            0.25 if policy in GUARDED else 0.0,
        ]
        for policy in (*OTHERS, *GUARDED)
        for seed in range(5 + CHOICE_SEEDS)
    }


def test_the_bars_table_has_medians_what_loses_and_what_was_not_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bar.json"
    monkeypatch.setattr(bar, "KEPT", file)
    traces = Traces.of(None)
    nothing = bar.page(traces, {})
    assert all(case in nothing for case in CASES)

    # By the luck of the judged seeds round-robin is the best.
    told = {"conductor": 80.0, "dynamo-adaptive": 90.0, "ttft": 97.0}
    losing = kept_runs(LOST, {**told, "round-robin": 79.0}, told)
    holding = kept_runs(HELD, {})
    unplayed = kept_runs(UNPLAYED, {})
    unplayed.popitem()
    file.write_text(json.dumps({**losing, **holding, **unplayed}))
    text = bar.page(traces, {})
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {LOST} "))
    assert "| conductor | 80 ms | 90 ms | 1.12 | 25 % | 97 ms | 1.21 | 25 % | 100 ms |" in row
    assert text.count(f"- {LOST}: ") == 2
    assert f"- {HELD}: " not in text
    assert UNPLAYED in text.splitlines()[-1]
    assert f"| {UNPLAYED} " not in text


def test_every_preset_is_played_and_presets_of_the_same_settings_share_a_run() -> None:
    groups = list(presets.groups().values())
    assert sorted(name for names in groups for name in names) == sorted(PRESETS)
    assert groups[0][0] == presets.BALANCED
    assert set(presets.AIMS) == set(PRESETS) - {presets.BALANCED}
    for name, aims in presets.AIMS.items():
        for aim in aims:
            assert aim.trace in FILES, name
            assert set(aim.rates) <= set(RATES), name


def test_the_default_preset_is_the_grids_default(tmp_path: Path) -> None:
    kept, traffic = Kept(tmp_path, "code"), Traces.of(None)["synthetic"]
    played = {case.options.policy: case.options for case in grid.cases(Traces.of(None))}
    balanced = presets.preset_fleet(presets.BALANCED)
    names = [
        kept.name(traffic, RATES[0], one)
        for one in (balanced, played[grid.DEFAULT], fleet("dynamo-adaptive"))
    ]
    assert len(set(names)) == 1
