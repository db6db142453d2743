"""Curves and heat maps as SVG, without scripts. Pure.

Every picture has a title and a description for screen readers. Texts are escaped here; numbers are
rounded to a tenth of a pixel. Colours and lines are those of picture.css.
"""

import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isnan, log10

import numpy as np

from simulator.traffic.results import Floats, Integers

COLOURS = 8
"""Number of CSS classes s0, s1 ... for lines; further lines use the same classes, dashed."""
_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
_MAP_LEFT, _ROW_MIN = 84, 2
_TICKS = 6
_KEY_COLUMNS, _KEY_ROW = 3, 18


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: maps the values from low to high to a share of the picture, 0 to 1."""

    low: float
    high: float
    name: str
    text: Callable[[float], str]
    is_log: bool = False

    def share(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = log10(low), log10(high), log10(max(value, self.low))
        return (value - low) / (high - low) if high > low else 0.0

    def ticks(self) -> list[float]:
        if self.is_log:
            return [
                10.0**power * step
                for power in range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
                for step in (1, 2, 5)
                if self.low <= 10.0**power * step <= self.high
            ]
        step = nice_step((self.high - self.low) / _TICKS)
        first = ceil(self.low / step)
        return [step * n for n in range(first, floor(self.high / step + 1e-9) + 1)]


def nice_step(least: float) -> float:
    """The smallest of ... 0.5, 1, 2, 5, 10, 20 ... that is at least `least`; 1 if `least` is not
    above 0."""
    if not least > 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Line:
    """A curve. NaN in y leaves a gap."""

    label: str
    x: Floats
    y: Floats
    number: int | None
    """Number of the line's colour; None: the line is the ceiling, in grey behind the others."""


def lines_picture(title: str, about: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """A picture (SVG) of curves over two axes, with the key of their labels below."""
    parts = [_axes(x, y)]
    for line in sorted(lines, key=lambda line: line.number is not None):
        path = _path(line, x, y)
        parts.append(
            f'<path class="{_classes(line)}" d="{path}"><title>{escape(line.label)}</title></path>'
        )
    for place, line in enumerate(lines):
        row, column = divmod(place, _KEY_COLUMNS)
        across = _LEFT + column * (_WIDTH - _LEFT) / _KEY_COLUMNS
        down = _HEIGHT + (row + 0.5) * _KEY_ROW
        parts.append(
            f'<path class="{_classes(line)}" d="M{across:.0f} {down:.0f}h28"/>'
            f'<text x="{across + 36:.0f}" y="{down + 4:.0f}">{escape(line.label)}</text>'
        )
    rows = ceil(len(lines) / _KEY_COLUMNS)
    return _picture(title, about, _WIDTH, _HEIGHT + rows * _KEY_ROW, "".join(parts))


def _classes(line: Line) -> str:
    if line.number is None:
        return "line ceiling"
    dashed = " dashed" if line.number // COLOURS % 2 else ""
    return f"line s{line.number % COLOURS}{dashed}"


def _path(line: Line, x: Axis, y: Axis) -> str:
    words, pen = [], "M"
    for at, value in zip(line.x.tolist(), line.y.tolist(), strict=True):
        if isnan(value):
            pen = "M"
            continue
        words.append(f"{pen}{_across(x.share(at)):.1f} {_down(y.share(value)):.1f}")
        pen = "L"
    return "".join(words)


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _down(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(x: Axis, y: Axis) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for value in y.ticks():
        down = _down(y.share(value))
        parts.append(
            f'<path class="grid" d="M{_LEFT} {down:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 8}" y="{down + 4:.1f}" class="end">{escape(y.text(value))}</text>'
        )
    for value in x.ticks():
        across = _across(x.share(value))
        parts.append(
            f'<path class="grid" d="M{across:.1f} {_TOP}V{bottom}"/>'
            f'<text x="{across:.1f}" y="{bottom + 16}" class="mid">{escape(x.text(value))}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" class="mid">{escape(x.name)}</text>')
    parts.append(
        f'<text class="mid" transform="translate(14 {_HEIGHT / 2 - 10:.0f}) rotate(-90)">'
        f"{escape(y.name)}</text>"
    )
    return "".join(parts)


def heat_map(title: str, about: str, cells: Integers, most: int, seconds: int) -> str:
    """A picture (SVG) of the requests at each worker over time. cells: shape (workers, spans).
    most: the value of the last colour, the same for all maps that are compared."""
    workers = len(cells)
    height = min(360, max(40, _ROW_MIN * workers, 12 * min(workers, 24)))
    across = _WIDTH - _MAP_LEFT - _RIGHT
    image = b64encode(png(cells, most)).decode() if cells.size else ""
    parts = [
        f'<text x="{_MAP_LEFT - 8}" y="12" class="end">worker 0</text>',
        f'<text x="{_MAP_LEFT - 8}" y="{height}" class="end">{workers - 1}</text>',
        f'<text x="{_MAP_LEFT}" y="{height + 18}">0 s</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{height + 18}" class="end">{seconds:,} s</text>',
    ]
    if image:
        parts.append(
            f'<image x="{_MAP_LEFT}" y="0" width="{across}" height="{height}"'
            f' preserveAspectRatio="none" href="data:image/png;base64,{image}"/>'
        )
    return _picture(title, about, _WIDTH, height + 24, "".join(parts))


def png(cells: Integers, most: int) -> bytes:
    """A PNG picture with a pixel for each cell, in the colours of `ramp` from 0 to `most`. Format:
    RFC 2083."""
    levels = np.clip(np.rint(cells * 255.0 / max(1, most)), 0, 255).astype(np.uint8)
    height, width = levels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each begins with the number of its filter
    rows[:, 1:] = levels

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"PLTE", bytes(value for level in range(256) for value in ramp(level / 255)))
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


_STOPS = ((13, 27, 42), (20, 83, 116), (38, 139, 134), (134, 192, 91), (253, 231, 76))
"""Colours of `ramp`, dark to light: readable without colours; the same on light and dark pages."""


def ramp(share: float) -> tuple[int, int, int]:
    """The colour of a share, 0 to 1, as red, green and blue, 0 to 255."""
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    first = min(int(place), len(_STOPS) - 2)
    rest = place - first
    red, green, blue = (
        round(low + rest * (high - low))
        for low, high in zip(_STOPS[first], _STOPS[first + 1], strict=True)
    )
    return red, green, blue


def _picture(title: str, about: str, width: int, height: int, inside: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title><desc>{escape(about)}</desc>{inside}</svg>"
    )
