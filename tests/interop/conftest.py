"""Other people's programs against kvroute's server: `make interop` runs them.

Clients call one set of engines and routers of a process of pytest: real ones, see fleet.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.fleet import Router, Secured, engines, router
from tests.stage.certificates import Authority, written

collect_ignore_glob = [] if os.environ.get("KVROUTE_INTEROP") else ["test_*.py"]


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Engines, as a router's configuration has them."""
    with engines(tmp_path_factory.mktemp("engines")) as settings:
        yield settings


@pytest.fixture(scope="session")
def plain(
    workers: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """A router on every address of localhost."""
    with router(tmp_path_factory.mktemp("plain"), workers) as serving:
        yield serving


def _secured(folder: Path, workers: list[dict[str, Any]], *, mutual: bool) -> Iterator[Secured]:
    authority = Authority()
    pair = authority.issue(hosts=("127.0.0.1", "::1", "localhost"))
    settings = written(folder, pair, authority if mutual else None)
    ca, certificate, key = (folder / name for name in ("authority.pem", "caller.crt", "caller.key"))
    ca.write_bytes(authority.pem)
    for path, content in zip((certificate, key), authority.issue("caller"), strict=True):
        path.write_bytes(content)
    tls = {"certificate_file": settings.certificate_file, "key_file": settings.key_file}
    if mutual:
        tls["client_ca_file"] = settings.client_ca_file
    with router(folder, workers, tls=tls) as serving:
        yield Secured(serving, str(ca), str(certificate), str(key))


@pytest.fixture(scope="session")
def tls(
    workers: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """A router with a certificate."""
    yield from _secured(tmp_path_factory.mktemp("tls"), workers, mutual=False)


@pytest.fixture(scope="session")
def mutual(
    workers: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """A router that takes callers with a certificate alone."""
    yield from _secured(tmp_path_factory.mktemp("mutual"), workers, mutual=True)
