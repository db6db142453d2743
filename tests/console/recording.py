"""A recording of `kvroute top` for the documentation: python -m tests.console.recording

A real router with played workers and requests to them, `kvroute top` in a terminal of tmux, and its
screen each second as a picture that moves: docs/pictures/top.svg. A worker falls silent, another
one is drained. It needs tmux.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.console.crowd import a_crowd

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "top.svg"
BYTES_MAX = 100_000
COLUMNS, LINES = 116, 22
FRAMES = 18
"""One a second."""
CELL_X, CELL_Y, MARGIN = 8, 18, 12
TITLE = "kvroute top"
ABOUT = (
    "A terminal with kvroute top: eight workers with their load and caches, the queue, and the"
    " latest decisions; one worker falls silent, and one is drained."
)
BACK, FORE, DIM = "#0d1117", "#e6edf3", "#9aa4af"
THEME = TerminalTheme(
    background=(13, 17, 23),
    foreground=(230, 237, 243),
    normal=[
        *((72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)),
    ],
)


def picture(screens: Sequence[Sequence[str]], columns: int = COLUMNS) -> str:
    """Screens, as lines with ANSI colours, one a second, as an SVG that repeats them.

    A line that stands in several screens is in the file once. Viewers that want no motion see the
    last screen.
    """
    rows: dict[str, int] = {}
    shown: list[str] = []
    for number, screen in enumerate(screens):
        uses = []
        for y, line in enumerate(screen):
            if drawn := _row(line):
                row = rows.setdefault(drawn, len(rows))
                uses.append(f'<use href="#r{row}" y="{(y + 1) * CELL_Y}"/>')
        shown.append(f'<g class="f" id="f{number}">{"".join(uses)}</g>')
    width = columns * CELL_X + 2 * MARGIN
    height = max(map(len, screens)) * CELL_Y + 2 * MARGIN
    defined = "".join(f'<g id="r{row}">{drawn}</g>' for drawn, row in rows.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-labelledby="title about"><title id="title">{TITLE}</title>'
        f'<desc id="about">{ABOUT}</desc><style>{_style(len(screens))}</style>'
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACK}"/><defs>{defined}</defs>'
        f'<g transform="translate({MARGIN} {MARGIN - 4})">{"".join(shown)}</g></svg>\n'
    )


def _style(frames: int) -> str:
    """Each screen is visible for its second of the round."""
    rules = [
        f"text{{font:14px ui-monospace,Menlo,Consolas,monospace;fill:{FORE};white-space:pre}}",
        f".f{{visibility:hidden;animation:{frames}s step-end infinite}}",
        f"#f{frames - 1}{{visibility:visible}}",
    ]
    for number in range(frames):
        begin, end = (f"{100 * place / frames:.3f}%" for place in (number, number + 1))
        before = "0%{visibility:hidden}" if number else ""
        after = f"{end}{{visibility:hidden}}" if number + 1 < frames else ""
        rules.append(f"#f{number}{{animation-name:k{number}}}")
        rules.append(f"@keyframes k{number}{{{before}{begin}{{visibility:visible}}{after}}}")
    rules.append("@media (prefers-reduced-motion:reduce){.f{animation:none!important}}")
    return "".join(rules)


def _row(line: str) -> str:
    """The texts of a line, each at its column and as wide as its cells; empty: a blank line."""
    drawn, column = [], 0
    for segment in Text.from_ansi(line).render(Console(color_system="truecolor")):
        text, cells = segment.text.rstrip("\n"), segment.cell_length
        stripped = text.lstrip(" ")
        indent = len(text) - len(stripped)
        stripped = stripped.rstrip(" ")
        if stripped:
            width = (Text(stripped).cell_len) * CELL_X
            drawn.append(
                f'<text x="{(column + indent) * CELL_X}" textLength="{width}"'
                f"{_look(segment.style)}>{escape(stripped)}</text>"
            )
        column += cells
    return "".join(drawn)


def _look(style: Style | None) -> str:
    if style is None:
        return ""
    fill = DIM if style.dim else ""
    if style.color is not None and not style.color.is_default:
        fill = style.color.get_truecolor(THEME).hex
    return (f' style="fill:{fill}"' if fill else "") + (' font-weight="700"' if style.bold else "")


async def _tmux(socket: Path, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "tmux", "-S", str(socket), *words, stdout=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    out, _ = await process.communicate()
    return out.decode()


async def record() -> list[list[str]]:
    """The screens of FRAMES seconds."""
    about = {"model": "llama-3.3-70b", "total_slots": 8, "total_blocks": 3000}
    workers = [(f"llama-{i:02}", {**about, "engine_version": "0.20.1"}) for i in range(8)]
    screens = []
    with tempfile.TemporaryDirectory() as name:
        socket = Path(name) / "tmux"
        async with a_crowd(workers, rate=8.0, output_s=4.0) as crowd:
            await asyncio.sleep(20)
            keys = {key.worker_id: key for key in crowd.fleet.relays}
            target = f"127.0.0.1:{crowd.app.listeners.grpc_port}"
            top = [str(Path(sys.executable).parent / "kvroute"), "top", "--target", target]
            size = ("-x", str(COLUMNS), "-y", str(LINES))
            await _tmux(socket, "new-session", "-d", *size, *top)
            try:
                while "workers serve" not in (shown := await _tmux(socket, "capture-pane", "-ep")):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                for number in range(FRAMES):
                    await asyncio.sleep(1.0)
                    if number == 5:
                        crowd.app.core.drain("llama-05")
                    if number == 1:
                        crowd.silent.add(keys["llama-02"])
                    shown = await _tmux(socket, "capture-pane", "-ep")
                    screens.append(shown.replace(target, "127.0.0.1:50051").splitlines())
            finally:
                await _tmux(socket, "kill-server")
    return screens


def main() -> None:
    svg = picture(asyncio.run(record()))
    if len(svg) > BYTES_MAX:
        raise SystemExit(f"the picture has {len(svg)} bytes, more than {BYTES_MAX}")
    PICTURE.write_text(svg, encoding="utf-8")
    sys.stdout.write(f"{PICTURE}: {len(svg)} bytes\n")


if __name__ == "__main__":
    main()
