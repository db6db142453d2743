"""A digest of the code that decides what a simulated run does; finished runs are kept under it."""

from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_128

ROOT = Path(__file__).parents[2]
PACKAGES = ("indexer", "events", "router", "simulator")
SUFFIXES = frozenset({".py", ".pyx", ".pxd", ".h", ".yaml"})
"""Of files that decide what a run does."""


def code_digest(root: Path = ROOT) -> str:
    """Hexadecimal, of the packages' files."""
    digest = xxh3_128()
    for file in _code(root):
        digest.update(f"{file.relative_to(root)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _code(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(one for one in (root / package).rglob("*") if one.suffix in SUFFIXES)
