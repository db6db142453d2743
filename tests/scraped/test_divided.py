"""Rules with divided durations say the same as before, in less time."""

import re

import helm_python as helm
import pytest

from tests.scraped.divided import divided, divided_expression, divided_rules, seconds
from tests.scraped.release import CHART


def test_durations_are_read_as_prometheus_reads_them() -> None:
    assert seconds("1h30m") == 5400
    assert seconds("250ms") == 0.25
    assert divided("15m", 20) == "45000ms"
    with pytest.raises(ValueError, match="'5 m' is no duration"):
        seconds("5 m")


def test_ranges_and_offsets_are_divided_and_strings_are_not() -> None:
    assert divided_expression('rate(x{a="[5m] offset 1h"}[5m] offset 15m) > 0.5', 20) == (
        'rate(x{a="[5m] offset 1h"}[15000ms] offset 45000ms) > 0.5'
    )


@pytest.mark.parametrize(
    "expression",
    [
        "max_over_time(rate(x[5m])[1h:1m])",
        "x offset -5m",
        "x > 5m",
        "time() - x > 300",
        "x @ 1609746000",
        "predict_linear(x[1h], 3600) < 0",
        "rate(x[$window])",
    ],
)
def test_an_expression_with_other_times_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="can't be divided"):
        divided_expression(expression, 20)


@pytest.mark.parametrize("key", ["keep_firing_for", "record"])
def test_a_rule_with_another_key_is_refused(key: str) -> None:
    rule = {"alert": "A", "expr": "x", key: "5m"}
    with pytest.raises(ValueError, match=f"A has keys that are not known: .'{key}'"):
        divided_rules({"groups": [{"name": "g", "rules": [rule]}]}, 20)


def test_the_charts_rules_can_all_be_divided() -> None:
    with helm.Chart.load(CHART) as chart:
        texts = chart.render({"prometheusRule": {"enabled": True}}, name="a", namespace="b")
    text = texts["kvroute/templates/prometheusrule.yaml"]
    spec = helm.values_from_yaml(text)["spec"]
    before = re.findall(r"\[(\w+)\]|offset (\w+)|for: (\w+)", text)
    rules = [rule for group in divided_rules(spec, 20)["groups"] for rule in group["rules"]]
    after = [rule["for"] for rule in rules if "for" in rule]
    for rule in rules:
        after += re.findall(r"\[(\w+)\]", rule["expr"]) + re.findall(r"offset (\w+)", rule["expr"])
    assert sorted(after) == sorted(divided("".join(one), 20) for one in before)
