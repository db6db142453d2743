"""Metrics that docs/operate.md and docs/gateway.md name are those of the program."""

import re

from tests.helm.rendered import CHART
from tests.stage.exported import relay_families, router_families

OF_A_WHOLE_PROCESS = {"kvroute_fleet_commands_total", "kvroute_relays_ended_total"}
"""Counters of parts that only a running process has, so that `exported` lacks them."""
PAGE = CHART.parents[1] / "docs" / "operate.md"


def test_every_metric_of_the_page_is_exported() -> None:
    """docs/reference-metrics.md lists all of them; this page those that say what to do."""
    exported = set()
    for family in (*router_families(), *relay_families()):
        exported |= {family.name, *(sample.name for sample in family.samples)}
    section = PAGE.read_text(encoding="utf-8").split("## Metrics")[1].split("\n## ")[0]
    named = set(re.findall(r"`(kvroute_\w+)", section))
    assert len(named) > 25
    lost = {name for name in named if not {name, name.removesuffix("_total")} & exported}
    assert lost == OF_A_WHOLE_PROCESS
