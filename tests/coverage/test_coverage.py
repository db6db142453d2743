"""The table of branches."""

from tests.coverage.__main__ import room_of, table


def test_a_room_has_the_sums_of_its_files() -> None:
    def file(*counts: int) -> dict[str, dict[str, int]]:
        names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
        return {"summary": dict(zip(names, counts, strict=True))}

    files = {
        "router/decide/core/core.py": file(10, 5, 4, 1),
        "router/decide/core/below/deep.py": file(30, 25, 0, 0),
        "indexer/index.py": file(20, 20, 6, 6),
        "/tmp/installed/indexer/index.py": file(20, 0, 6, 0),
    }
    rows = [line.split() for line in table({"files": files}).splitlines()[1:]]
    assert rows == [
        ["indexer", "20", "100.0%", "6", "100.0%"],
        ["router/decide", "40", "75.0%", "4", "25.0%"],
        ["all", "60", "83.3%", "10", "70.0%"],
    ]


def test_a_room_is_two_folders_deep() -> None:
    assert room_of("proto/kvroute/client/requests/life.py") == "proto/kvroute"
    assert room_of("setup.py") == ""
