"""Alert rules in short: `for`, ranges and offsets divided by a factor, and nothing else changed.

Law: a rule with a duration in a place that is not known here is refused, since a part of it would
keep its length.
"""

import re
from typing import Any

Rule = dict[str, Any]

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_PART = re.compile(r"(\d+)(ms|[smhdwy])")
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
_PLACES = re.compile(rf"(\[)({_DURATION})(\])|(\boffset\s+)({_DURATION})()")
_STRINGS = re.compile(r'"(?:\\.|[^"\\])*"' + r"|'(?:\\.|[^'\\])*'")
_CLOCKS = re.compile(r"\b(?:time|timestamp|hour|minute|day_of_\w+|predict_linear|deriv)\s*\(|@")
_KEYS = {"alert", "expr", "for", "labels", "annotations"}


def seconds(duration: str) -> float:
    """A duration of Prometheus. Raises ValueError for anything else."""
    if not re.fullmatch(_DURATION, duration):
        raise ValueError(f"{duration!r} is no duration")
    return sum(int(number) * _UNITS_S[unit] for number, unit in _PART.findall(duration))


def divided(duration: str, factor: float) -> str:
    """A duration by a factor, in whole milliseconds."""
    return f"{round(seconds(duration) * 1000 / factor)}ms"


def divided_expression(expression: str, factor: float) -> str:
    """PromQL with its ranges and offsets divided.

    Raises ValueError for a subquery, a bracket or an offset that holds no plain duration, for a
    function or an @ that asks for a time, and for any duration that is left over.
    """
    bare = _STRINGS.sub('""', expression)
    rest = _PLACES.sub("", bare)
    for odd in (r"[\[\]]", r"\boffset\b", rf"\b{_DURATION}\b", _CLOCKS.pattern):
        if found := re.search(odd, rest):
            raise ValueError(f"{found[0]!r} can't be divided, in: {expression}")

    def shorter(match: re.Match[str]) -> str:
        before, duration, after = match.groups()[:3] if match[1] else match.groups()[3:]
        return f"{before}{divided(duration, factor)}{after}"

    parts = _STRINGS.split(expression)
    strings = [*_STRINGS.findall(expression), ""]
    return "".join(
        _PLACES.sub(shorter, part) + string for part, string in zip(parts, strings, strict=True)
    )


def divided_rules(spec: dict[str, Any], factor: float) -> dict[str, Any]:
    """The spec of a PrometheusRule with all its durations divided. Raises ValueError as above, and
    for keys that may hold durations and are not known."""
    groups = []
    for group in spec["groups"]:
        if group.keys() - {"name", "rules"}:
            raise ValueError(f"group {group['name']} has more than rules: {sorted(group)}")
        groups.append(group | {"rules": [_divided_rule(rule, factor) for rule in group["rules"]]})
    return spec | {"groups": groups}


def _divided_rule(rule: Rule, factor: float) -> Rule:
    if unknown := rule.keys() - _KEYS:
        raise ValueError(f"{rule.get('alert')} has keys that are not known: {sorted(unknown)}")
    changed = {"expr": divided_expression(rule["expr"], factor)}
    if "for" in rule:
        changed["for"] = divided(rule["for"], factor)
    return rule | changed
