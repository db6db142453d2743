"""The console's files: a page, its modules, its styles. Read once; no other file is served."""

from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """One file of the console."""

    body: bytes
    content_type: str
    etag: str


def read_assets() -> dict[str, Asset]:
    """Files of router/observe/console/static, by name."""
    assets = {}
    for entry in files("router.observe.console").joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            body = entry.read_bytes()
            assets[entry.name] = Asset(body, TYPES[suffix], f'"{sha256(body).hexdigest()[:32]}"')
    return assets
