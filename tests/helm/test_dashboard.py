"""The Grafana dashboard: it asks for what is exported, and says what it shows."""

import json
import re
from collections.abc import Callable

import pytest

from tests.helm.rendered import CHART, Object, Rendered
from tests.stage.exported import (
    gateway_families,
    names,
    picker_families,
    relay_families,
    router_families,
    series,
)

OPEN_MAX = 30
"""Panels that are open, and asked for, when the dashboard opens."""
PROCESS_METRICS = ("process_cpu_seconds_total", "process_resident_memory_bytes")
"""Of what the Prometheus client adds of its own, those worth a panel."""


@pytest.fixture(scope="module")
def dashboard() -> Object:
    return json.loads((CHART / "dashboards" / "kvroute.json").read_text(encoding="utf-8"))


def panels_of(dashboard: Object) -> list[Object]:
    """Those of folded rows, too."""
    rows = [panel["panels"] for panel in dashboard["panels"] if panel["type"] == "row"]
    return [panel for panel in sum(rows, dashboard["panels"]) if panel["type"] != "row"]


def metrics_in(text: str) -> set[str]:
    names = set(re.findall(r"\b(?:kvroute|process)_[a-z_]+\b", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_dashboard_reaches_the_sidecar_unchanged(default: Rendered, dashboard: Object) -> None:
    configmap = default["dashboard.yaml"]
    assert configmap["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert set(configmap["data"]) == {path.name for path in (CHART / "dashboards").iterdir()}
    assert json.loads(configmap["data"]["kvroute.json"]) == dashboard


def test_dashboard_can_be_labelled_filed_and_left_out(
    production: Rendered, render: Callable[..., Rendered]
) -> None:
    assert production["dashboard.yaml"]["metadata"]["annotations"]["grafana_folder"] == "Inference"
    labelled = render(dashboard={"label": "dash", "labelValue": "yes"})
    assert labelled["dashboard.yaml"]["metadata"]["labels"]["dash"] == "yes"
    assert "dashboard.yaml" not in render(dashboard={"enabled": False})


def test_dashboard_asks_for_metrics_that_are_exported_and_shows_each_of_them(
    dashboard: Object,
) -> None:
    exported = names(
        [*router_families(), *relay_families(), *gateway_families(), *picker_families()]
    )
    own = {name for name in exported if name.startswith("kvroute_")}
    asked = metrics_in(
        " ".join(target["expr"] for panel in panels_of(dashboard) for target in panel["targets"])
    )
    assert asked == {*own, *PROCESS_METRICS}
    assert asked <= exported
    queries = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert metrics_in(" ".join(query["query"] for query in queries)) <= own


def test_counters_are_rated_and_gauges_are_not(dashboard: Object) -> None:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            rated = set(re.findall(r"rate\((\w+)\{", target["expr"]))
            counters = {
                name
                for name in re.findall(r"\b(?:kvroute|process)_\w+", target["expr"])
                if name.endswith(("_total", "_bucket", "_sum", "_count"))
            }
            assert rated == counters, panel["title"]


def test_queries_name_labels_that_their_families_have(dashboard: Object) -> None:
    """Where a family has series at the start; a wrong label would match nothing, or everything."""
    labels: dict[str, set[str]] = {}
    families = [*router_families(), *relay_families(), *gateway_families(), *picker_families()]
    for one in series(families):
        labels.setdefault(one.name, {"fleet", "job", "instance"}).update(one.labels)
    seen = set()
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            expression = target["expr"]
            for name, matchers in re.findall(r"\b(kvroute_\w+)\{([^}]*)\}", expression):
                matched = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers))
                assert matched <= labels.get(name, matched), panel["title"]
                seen.add(name)
            grouped = re.findall(r"by \(([^)]*)\) \((?:rate\()?(kvroute_\w+)", expression)
            for by, name in grouped:
                wanted = set(by.split(", "))
                assert wanted <= labels.get(name, wanted), panel["title"]
    assert len(seen & set(labels)) > 80


def test_every_panel_says_what_it_shows(dashboard: Object) -> None:
    for panel in panels_of(dashboard):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_every_query_goes_through_the_variables(dashboard: Object) -> None:
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "fleet", "job", "worker"}
    for panel in panels_of(dashboard):
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert "fleet" in used, panel["title"]
            assert used <= variables, panel["title"]


def test_panels_have_their_own_ids_and_places(dashboard: Object) -> None:
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    ids = [panel["id"] for panel in [*rows, *panels_of(dashboard)]]
    assert len(ids) == len(set(ids))
    places_are_apart(dashboard["panels"])
    for row in rows:
        places_are_apart(row["panels"])


def places_are_apart(panels: list[Object]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_dashboard_answers_its_questions_in_order(dashboard: Object) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == [
        "Is it working?",
        "What do tenants get?",
        "Is load even?",
        "Do requests wait?",
        "Is the index trustworthy?",
        "Are the picks good?",
        "The router itself",
        "Do the gateway's clients get answers?",
        "Do Envoy's requests get endpoints?",
        "Are pods followed?",
    ]


def test_a_screen_of_panels_is_open_and_the_other_rows_fold(dashboard: Object) -> None:
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    assert sum(panel["type"] != "row" for panel in dashboard["panels"]) <= OPEN_MAX
    assert all(row["collapsed"] == bool(row["panels"]) for row in rows)
