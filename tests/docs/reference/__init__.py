"""Pages that are made of others or of the code: python -m tests.docs.reference writes them all."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.reference import (
    commands,
    configuration,
    contract,
    metrics,
    playbook,
    ports,
    statuses,
)

ROOT = Path(__file__).parents[3]
PAGES: Mapping[Path, Callable[[], str]] = {
    Path("docs/reference-commands.md"): commands.page,
    Path("docs/reference-configuration.md"): configuration.page,
    Path("docs/reference-metrics.md"): metrics.page,
    Path("docs/reference-statuses.md"): statuses.page,
    Path("docs/reference-grpc.md"): contract.page,
    Path("docs/reference-http.md"): ports.page,
    Path("router/observe/console/static/playbook.json"): playbook.page,
}
