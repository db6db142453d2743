"""Key files for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from events.plane.clock import unix_now
from router.net.keys.door import Door
from router.net.keys.key_ring import PREFIX, digest

RIGHTS = ("route", "report", "observe", "administer")


def identity(name: str, *, rights: tuple[str, ...] = RIGHTS, **about: Any) -> dict[str, Any]:
    """An entry of a key file whose token is `NAME-token`, unless `about` has other keys."""
    tokens = [hashed(f"{name}-token")]
    return {"name": name, "rights": list(rights), "tokens": tokens} | about


def hashed(token: str) -> str:
    """As the key file has it."""
    return PREFIX + digest(token).hex()


def write_keys(folder: Path, *identities: dict[str, Any], **parts: Any) -> str:
    """Writes a key file; its path."""
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"identities": list(identities)} | parts), encoding="utf-8")
    return str(path)


def a_door(
    folder: Path, *identities: dict[str, Any], clock: Callable[[], float] = unix_now, **parts: Any
) -> Door:
    """A door with these identities."""
    return Door(write_keys(folder, *identities, **parts), clock=clock)


def bearer(token: str) -> tuple[tuple[str, str]]:
    """Metadata of a call."""
    return (("authorization", f"Bearer {token}"),)
