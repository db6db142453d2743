"""The alert rules: rendered by real Helm, checked and played through by Prometheus' promtool.

Law: an alert asks for series that a router or a relay exports at its start; it fires for what it is
about and for nothing else; and helm/ALERTS.md says what to do.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import helm_python as helm
import pytest
import yaml

from router.fleet.health.warnings import WarningCode
from tests.helm.alert_stories import MINUTES, STORIES, Story
from tests.helm.config_schema import SCHEMA_FILE
from tests.helm.rendered import CHART, Object, Rendered, values_of
from tests.stage.exported import (
    Series,
    gateway_families,
    picker_families,
    relay_families,
    router_families,
    series,
)

PLAYBOOK = CHART.parent / "ALERTS.md"
OPERATE_PAGE = CHART.parents[1] / "docs" / "operate.md"
PROMTOOL = shutil.which("promtool")
SCRAPE_LABELS = {"namespace", "fleet", "pod", "instance"}

with_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not here: .ci/prometheus.sh fetches it, where apt is"
)


def rules_of(rendered: Rendered) -> dict[str, Object]:
    """Rules by alert."""
    groups = rendered["prometheusrule.yaml"]["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    return {rule["alert"]: rule for rule in rules}


@pytest.fixture(scope="module")
def rules(production: Rendered) -> dict[str, Object]:
    return rules_of(production)


@pytest.fixture(scope="module")
def exported() -> list[Series]:
    return series([*router_families(), *relay_families(), *gateway_families(), *picker_families()])


class Selector(NamedTuple):
    """What an expression asks for: kvroute_x{label="value",...}."""

    name: str
    matchers: list[tuple[str, str, str]]

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        return self.name == name and all(
            _compare(labels.get(label, ""), sign, value) for label, sign, value in self.matchers
        )


def _compare(told: str, sign: str, value: str) -> bool:
    equal = told == value if sign in ("=", "!=") else bool(re.fullmatch(value, told))
    return equal == (sign in ("=", "=~"))


def selectors_in(text: str) -> list[Selector]:
    return [
        Selector(name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers))
        for name, matchers in re.findall(r"\b(kvroute_\w+)(?:\{([^}]*)\})?", text)
    ]


# --- the object -----------------------------------------------------------------------------------


def test_rules_are_optional_and_carry_the_labels_that_find_them(
    default: Rendered, production: Rendered
) -> None:
    assert "prometheusrule.yaml" not in default
    assert production["prometheusrule.yaml"]["kind"] == "PrometheusRule"
    labels = production["prometheusrule.yaml"]["metadata"]["labels"]
    assert labels["release"] == "kube-prometheus-stack"


def test_alerts_say_how_severe_they_are_and_of_which_fleet(rules: dict[str, Object]) -> None:
    for alert, rule in rules.items():
        labels = dict(rule["labels"])
        assert labels.pop("severity") in ("critical", "warning"), alert
        assert labels == {"namespace": "inference", "fleet": "chat-eu", "team": "inference"}
        assert len(rule["annotations"]["summary"]) > 20, alert


def test_alerts_name_their_paragraph_where_the_playbook_has_an_address(
    render: Callable[..., Rendered], rules: dict[str, Object]
) -> None:
    assert all(set(rule["annotations"]) == {"summary"} for rule in rules.values())
    rendered = render(prometheusRule={"enabled": True, "playbookUrl": "https://wiki/alerts"})
    for alert, rule in rules_of(rendered).items():
        assert rule["annotations"]["runbook_url"] == f"https://wiki/alerts#{alert.lower()}"


def test_the_playbook_has_a_paragraph_for_each_alert_and_for_no_other(
    rules: dict[str, Object],
) -> None:
    headings = re.findall(r"^### (\w+)$", PLAYBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(rules)


def test_thresholds_are_the_operators(
    render: Callable[..., Rendered], rules: dict[str, Object]
) -> None:
    thresholds: dict[str, Any] = {
        "refusedShare": 0.11,
        "queueWaitShare": 0.16,
        "expiredShare": 0.12,
        "decisionSecondsP99": 0.013,
        "hitsTakenShare": 0.15,
        "estimatedShare": 0.17,
        "gatewayFailedShare": 0.18,
        "loadImbalance": 1.6,
        "selfCheckResyncsPerHour": 14,
        "engineSilentFor": "16m",
    }
    changed = rules_of(
        render(
            **values_of("production")
            | {
                "prometheusRule": {
                    "enabled": True,
                    "thresholds": thresholds,
                    "ignoredWarnings": ["partial", "clock_skew"],
                }
            }
        )
    )
    assert changed["KvrouteRequestsRefused"]["expr"].endswith("> 0.11")
    assert " 0.16 * max by" in changed["KvrouteRequestsWaitLong"]["expr"]
    assert changed["KvrouteReservationsExpire"]["expr"].endswith("> 0.12")
    assert changed["KvrouteDecisionsSlow"]["expr"].endswith("> 0.013")
    assert "< 0.15\n" in changed["KvrouteHitsMissed"]["expr"]
    assert changed["KvroutePromptsEstimated"]["expr"].endswith("> 0.17")
    assert changed["KvrouteGatewayFails"]["expr"].endswith("> 0.18")
    assert "> 1.6\n" in changed["KvrouteLoadUneven"]["expr"]
    assert changed["KvrouteSelfCheckResyncs"]["expr"].endswith("> 14")
    assert changed["KvrouteEngineSilent"]["for"] == "16m"
    assert 'code!~"partial|clock_skew"' in changed["KvrouteWorkerWarning"]["expr"]
    differ = {
        alert
        for alert, rule in rules.items()
        if (rule["expr"], rule.get("for")) != (changed[alert]["expr"], changed[alert].get("for"))
    }
    assert len(differ) == len(thresholds) + 1


def test_a_router_that_is_to_be_away_is_not_missed(render: Callable[..., Rendered]) -> None:
    one = rules_of(render(prometheusRule={"enabled": True}))
    assert "KvrouteRoutersMissing" not in one
    none = rules_of(render(replicaCount=0, prometheusRule={"enabled": True}))
    assert none["KvrouteNoRouterReady"]["expr"].endswith("< 0")


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"ignoredWarnings": ["aproximate"]}, "at '/prometheusRule/ignoredWarnings/0'"),
        ({"thresholds": {"decisionSecondsP99": 0.1}}, "at '/prometheusRule/thresholds/decision"),
        ({"thresholds": {"engineSilentFor": "long"}}, "at '/prometheusRule/thresholds/engine"),
        ({"thresholds": {"gaps": 1}}, "at '/prometheusRule/thresholds': .*'gaps'"),
    ],
)
def test_thresholds_that_could_not_work_are_refused(
    chart: helm.Chart, rule: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=complaint):
        chart.render({"prometheusRule": rule})


def test_schema_knows_every_code_of_a_warning() -> None:
    schema = yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))
    ignored = schema["properties"]["prometheusRule"]["properties"]["ignoredWarnings"]
    assert ignored["items"]["enum"] == [code.value for code in WarningCode]


# --- what the expressions ask for -----------------------------------------------------------------


def test_each_selector_finds_a_series_that_is_exported_at_the_start(
    rules: dict[str, Object], exported: list[Series]
) -> None:
    for alert, rule in rules.items():
        selectors = selectors_in(rule["expr"])
        assert selectors, alert
        for name, matchers in selectors:
            own = Selector(name, [one for one in matchers if one[0] not in SCRAPE_LABELS])
            assert any(own.matches(one.name, one.labels) for one in exported), (alert, own)
            # A label that no series has would match nothing, or everything.
            labels = {label for one in exported if one.name == name for label in one.labels}
            assert {label for label, _, _ in own.matchers} <= labels, (alert, own)


def test_each_selector_keeps_to_one_fleet(rules: dict[str, Object]) -> None:
    for alert, rule in rules.items():
        for name, matchers in selectors_in(rule["expr"]):
            assert ("fleet", "=", "chat-eu") in matchers, (alert, name)
            own_namespace = ("namespace", "=", "inference") in matchers
            either = name.startswith(
                ("kvroute_relay_", "kvroute_broker_", "kvroute_gateway_", "kvroute_refusals_")
            )
            assert own_namespace != either, (alert, name)


def test_expressions_of_the_page_on_operation_are_those_of_the_rules(
    rules: dict[str, Object],
) -> None:
    text = OPERATE_PAGE.read_text(encoding="utf-8")
    warning, self_check = re.findall(r"`(max[^`]*kvroute_.*?)`(.*)", text)
    bare = {
        alert: re.sub(r',?\s*namespace="\w+",fleet="[\w-]+"\s*', "", rule["expr"])
        for alert, rule in rules.items()
    }
    assert warning[0] == bare["KvrouteWorkerWarning"]
    assert warning[1].startswith(", for 10 minutes")
    assert rules["KvrouteWorkerWarning"]["for"] == "10m"
    assert self_check[0] == bare["KvrouteSelfCheckResyncs"].replace("{}", "")
    assert "for" not in rules["KvrouteSelfCheckResyncs"]


# --- played through by promtool -------------------------------------------------------------------


def test_dynamos_planner_reads_traffic_by_its_own_names(
    render: Callable[..., Rendered], exported: list[Series]
) -> None:
    rendered = render(prometheusRule={"enabled": True, "dynamoNamespace": "pool-a"})
    *_, group = rendered["prometheusrule.yaml"]["spec"]["groups"]
    known = {one.name for one in exported}
    recorded = {}
    for rule in group["rules"]:
        assert rule["labels"] == {"dynamo_namespace": "pool_a"}
        (selector,) = selectors_in(rule["expr"])
        assert selector.name in known
        recorded[rule["record"].removeprefix("dynamo_component_router_")] = rule["expr"]
    averages = {
        f"{name}_{part}"
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "input_sequence_tokens",
            "output_sequence_tokens",
            "kv_hit_rate",
        )
        for part in ("sum", "count")
    }
    assert set(recorded) == {*averages, "requests_started_total", "requests_total"}
    assert recorded["requests_started_total"] == recorded["requests_total"]


@with_promtool
def test_the_planners_queries_have_answers(render: Callable[..., Rendered], tmp_path: Path) -> None:
    """As components/src/dynamo/planner/monitoring/traffic_metrics.py of ai-dynamo/dynamo asks."""
    rule = {"prometheusRule": {"enabled": True, "dynamoNamespace": "pool-a"}}
    write_rules(render(**values_of("production") | rule), tmp_path)
    where = 'namespace="inference",fleet="chat-eu",model="m"'
    name, of = "dynamo_component_router", '{dynamo_namespace="pool_a"}[10m]'
    mean = f"{name}_input_sequence_tokens"
    queries = {
        f"sum(increase({mean}_sum{of})) / sum(increase({mean}_count{of}))": 800,
        f"sum(increase({name}_requests_started_total{of})"
        f" or ignoring(__name__) increase({name}_requests_total{of}))": 200,
    }
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'kvroute_prompt_tokens_{part}{{{where},role="{role}"}}', "values": values}
            for part, values in (("sum", "0+8000x30"), ("count", "0+10x30"))
            for role in ("prefill", "both")
        ],
        "promql_expr_test": [
            {
                "expr": f"round({query})",
                "eval_time": "30m",
                "exp_samples": [{"labels": "{}", "value": value}],
            }
            for query, value in queries.items()
        ],
    }
    story = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "story.yaml").write_text(yaml.safe_dump(story), encoding="utf-8")
    promtool(tmp_path, "test", "rules", "story.yaml")


def promtool(folder: Path, *arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write_rules(rendered: Rendered, folder: Path) -> None:
    spec = rendered["prometheusrule.yaml"]["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")


@with_promtool
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"ignoredWarnings": []},
        {"thresholds": {"engineSilentFor": "1h30m"}, "alertLabels": {"team": "a: b"}},
        {"dynamoNamespace": "pool-a"},
    ],
)
def test_prometheus_takes_the_rules(
    render: Callable[..., Rendered], tmp_path: Path, values: dict[str, Any]
) -> None:
    write_rules(render(prometheusRule={"enabled": True, **values}), tmp_path)
    promtool(tmp_path, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")


def healthy(rules: dict[str, Object]) -> list[tuple[str, dict[str, str], str]]:
    """Name, labels and values of what three routers and a relay export while all is well.

    Less what no rule asks for, which halves promtool's time.
    """
    asked = {one.name for rule in rules.values() for one in selectors_in(rule["expr"])}
    scraped = [("inference", f"router-{i}", series(router_families())) for i in range(3)]
    scraped.append(("engines", "engine-0", series(relay_families())))
    scraped.append(("apps", "gateway-0", series(gateway_families())))
    told = []
    for namespace, pod, exported in scraped:
        where = {"namespace": namespace, "fleet": "chat-eu", "pod": pod, "instance": f"{pod}:9464"}
        for name, labels, value in exported:
            if name not in asked or labels.get("stage", "total") != "total":
                continue
            usual = "1" if name == "kvroute_broker_connected" else f"{value:g}"
            if labels.get("code") == WarningCode.RELAY:
                usual = "_"
            told.append((name, labels | where, f"{usual}x{MINUTES}"))
    return told


def input_series(rules: dict[str, Object], one: Story) -> list[dict[str, str]]:
    """A healthy fleet's series with a story's changes, as promtool reads them."""
    told = healthy(rules)
    for selector_text, values in one.changes.items():
        (selector,) = selectors_in(selector_text)
        changed = [selector.matches(name, labels) for name, labels, _ in told]
        assert any(changed), selector_text
        told = [
            (name, labels, values if change else usual)
            for (name, labels, usual), change in zip(told, changed, strict=True)
        ]
    return [
        {
            "series": name + "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}",
            "values": values,
        }
        for name, labels, values in told
    ]


def expectation(query: str, samples: list[str]) -> Object:
    return {
        "expr": query,
        "eval_time": f"{MINUTES}m",
        "exp_samples": [{"labels": labels, "value": 1} for labels in samples],
    }


@with_promtool
@pytest.mark.parametrize("one", STORIES, ids=[one.told for one in STORIES])
def test_what_fires_is_what_is_wrong(
    production: Rendered, rules: dict[str, Object], tmp_path: Path, one: Story
) -> None:
    expected = [
        expectation(
            'group by (alertname) (ALERTS{alertstate="firing"})',
            [f'{{alertname="{alert}"}}' for alert in sorted(one.fires)],
        )
    ]
    for alert in sorted(one.fires):  # and each has the labels that its summary names
        named = re.findall(r"\$labels\.(\w+)", rules[alert]["annotations"]["summary"])
        there = "".join(f',{label}!=""' for label in named)
        query = f'group(ALERTS{{alertname="{alert}",alertstate="firing"{there}}})'
        expected.append(expectation(query, ["{}"]))
    test = {
        "interval": "1m",
        "input_series": input_series(rules, one),
        "promql_expr_test": expected,
    }
    write_rules(production, tmp_path)
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.json").write_text(json.dumps(document), encoding="utf-8")
    promtool(tmp_path, "test", "rules", "test.json")  # JSON is YAML, and quicker to write


def test_every_alert_fires_in_a_story(rules: dict[str, Object]) -> None:
    assert set().union(*(one.fires for one in STORIES)) == set(rules)


def test_the_series_of_every_alert_move_in_a_story_in_which_it_is_silent(
    rules: dict[str, Object],
) -> None:
    for alert, rule in rules.items():
        asked = {selector.name for selector in selectors_in(rule["expr"])}
        assert any(
            alert not in one.fires and asked & {name.split("{")[0] for name in one.changes}
            for one in STORIES
        ), alert
