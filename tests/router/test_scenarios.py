"""Stories of the router in files: what came out, and what must hold (tests/stage/story.py)."""

from pathlib import Path

import pytest

from tests.stage.script import REWRITE
from tests.stage.story import play

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
SMALL = """\
fleet workers=2
prompts 4 rate=10 text=own*:512 output=2
play round-robin
----
policy        lost    hit  requests  least  uneven  ttft_ms
round-robin      0   0.00      1.00   1.00    2.00       25

"""


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
@pytest.mark.long
def test_the_story_goes_as_told_and_its_bounds_hold(path: Path) -> None:
    play(path)


def test_a_file_is_written_anew_and_then_goes_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.txt"
    path.write_text(SMALL.replace("1.00   1.00", "7.00   7.00"))
    with pytest.raises(AssertionError, match="line 6: told"):
        play(path)
    monkeypatch.setenv(REWRITE, "1")
    play(path)
    monkeypatch.delenv(REWRITE)
    play(path)
    assert "1.00   1.00" in path.read_text()


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ("bound requests > 1.5 held by round-robin", "round-robin breaks requests > 1.500: 1.000"),
        ("bound requests < 1.5 broken by round-robin", "round-robin keeps requests < 1.500: 1.000"),
    ],
)
def test_a_bound_fails_when_it_is_broken_or_kept_by_those_who_should_not(
    tmp_path: Path, bound: str, told: str
) -> None:
    path = tmp_path / "small.txt"
    path.write_text(f"{SMALL}{bound}\n")
    with pytest.raises(AssertionError, match=told):
        play(path)
