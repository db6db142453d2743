"""Every metric that kvroute's programs export."""

from prometheus_client.core import Metric

from router.observe.metrics.scrape import join
from tests.docs.reference.markdown import cell
from tests.stage.exported import gateway_families, picker_families, relay_families, router_families

HEAD = """# Metrics

Every metric with the labels that are there from the start and its help text, made by
`python -m tests.docs.reference`. Counters end in `_total`, histograms are named; all others are
gauges. [Operate](operate.md#metrics) groups them and has the values of labels,
[alerts](../helm/ALERTS.md) what to do. Every process also exports `process_*` and `python_*`.
"""
PROGRAMS = {
    "kvroute serve": router_families,
    "kvroute relay, and a router with relays": relay_families,
    "kvroute gateway, and a router with a gateway (on both its ports)": gateway_families,
    "kvroute picker, and a router with an endpoint picker": picker_families,
}
ABOUT_SAMPLES = {"le", "quantile"}
"""Labels of one histogram's samples."""


def page() -> str:
    lines = [HEAD]
    known: set[str] = set()
    for program, families in PROGRAMS.items():
        by_name: dict[str, Metric] = {}
        for family in families():
            join(by_name, family)
        rows = sorted(map(row, by_name.values()), key=lambda cells: cells[0])
        fresh = [
            cells for cells in rows if cells[0] not in known and cells[0].startswith("kvroute_")
        ]
        known |= {cells[0] for cells in fresh}
        lines += [f"## {program}", "", *(_line(*cells) for cells in fresh), ""]
    return "\n".join(lines)


def _line(name: str, kind: str, labels: str, meaning: str) -> str:
    named = f"`{name}{f'{{{labels}}}' if labels else ''}`"
    return f"- {named}{' histogram' if kind == 'histogram' else ''}: {meaning}"


def row(family: Metric) -> tuple[str, str, str, str]:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels: dict[str, None] = {}
    for sample in family.samples:
        labels |= dict.fromkeys(label for label in sample.labels if label not in ABOUT_SAMPLES)
    return name, family.type, ",".join(labels), cell(family.documentation)
