"""Commands that call a router, where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import click

from router.app.main import cli

EACH_IN_TURN = """
import json, sys
from router.app.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["kvroute", *arguments]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code, file=sys.stderr)
"""
CALLS: dict[str, list[str]] = {
    "envoy-config": [],
    "explain": ["--tokens", "1,2,3"],
    "workers": [],
    "queue": [],
    "tail": [],
    "top": [],
    "drain": ["w"],
    "undrain": ["w"],
    "remove": ["w"],
    "resync": ["w"],
    "register": ["w", "--engine", "vllm", "--address", "http://127.0.0.1:1"],
}
"""Each command with the arguments that it needs to call a router."""


def has_target(command: click.Command) -> bool:
    return any("--target" in parameter.opts for parameter in command.params)


def test_every_command_that_calls_a_router_is_here() -> None:
    assert CALLS.keys() == {name for name, each in cli.commands.items() if has_target(each)}


def test_an_unreachable_router_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/none"
    lines = [[name, *arguments, "--target", target] for name, arguments in CALLS.items()]
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_TURN, json.dumps(lines)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == ""
    printed = done.stderr.splitlines()
    assert len(printed) == 2 * len(CALLS), done.stderr
    for error, end in zip(printed[::2], printed[1::2], strict=True):
        assert error.startswith(f"kvroute: {target}: UNAVAILABLE: ")
        assert end == "exit code 1"
