"""The list of metrics in docs/operate.md is that of the program."""

import re

from tests.helm.rendered import CHART
from tests.stage.exported import relay_families, router_families

OF_A_WHOLE_PROCESS = {
    "kvroute_fleet_commands_total",
    "kvroute_fleet_state_total",
    "kvroute_nats_restarts_total",
    "kvroute_relay_failures_total",
    "kvroute_relays_ended_total",
}
"""Counters of parts that only a running process has, so that `exported` lacks them."""
PAGE = CHART.parents[1] / "docs" / "operate.md"


def test_every_metric_of_the_page_is_exported_and_every_exported_one_is_on_the_page() -> None:
    exported = set()
    for family in (*router_families(), *relay_families()):
        for sample in family.samples:
            exported.add(re.sub(r"_(bucket|sum|count|created)$", "", sample.name))
        exported.add(family.name)
    table = PAGE.read_text(encoding="utf-8").split("## Metrics")[1]
    first = [row.split(" | ")[0] for row in re.findall(r"^\| (.*)", table, re.MULTILINE)]
    names = [name for cell in first for name in re.findall(r"`([a-z_]+)", cell)]
    whole = {name for name in names if name.startswith("kvroute_")}
    lost = {name for name in whole if not _is_one_of(name, exported)}
    assert lost == OF_A_WHOLE_PROCESS
    endings = tuple(name for name in names if name.startswith("_"))
    mine = {name for name in exported if name.startswith("kvroute_")}
    unlisted = {
        name
        for name in mine
        if not _is_one_of(name, whole)
        and not f"{name}_total".endswith(endings)
        and not name.endswith(endings)
    }
    assert unlisted == set()


def _is_one_of(name: str, names: set[str]) -> bool:
    """Counters are listed with `_total`, as they are scraped; their families have none."""
    return name in names or f"{name}_total" in names or name.removesuffix("_total") in names
