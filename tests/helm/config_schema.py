"""The `config` of values.schema.json is the router's own configuration, as the program defines it.

The chart's schema is written by hand except for its `$defs`, which come from ServeConfig.
To write them again after the program's keys changed: python -m tests.helm.config_schema
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from router.config.settings.configurations import ServeConfig
from router.decide.policies import POLICIES

SCHEMA_FILE = Path(__file__).parents[2] / "helm" / "kvroute" / "values.schema.json"
WIDTH = 100
POLICY_KEYS = {"policy", "prefill_policy", "decode_policy", "shadow_policy"}
POLICY = [{"enum": sorted(POLICIES)}, {"type": "string", "pattern": ":"}]
"""A policy by name, or module:function."""
NULL = {"type": "null"}


def config_definitions() -> dict[str, Any]:
    """`$defs` for ServeConfig: no secrets, which have no place in a ConfigMap; no defaults and no
    descriptions, which the program owns."""
    definitions = msgspec.json.schema(ServeConfig)["$defs"]
    for definition in definitions.values():
        properties = definition["properties"]
        for name in [name for name, value in properties.items() if value.get("secret")]:
            del properties[name]
        for value in properties.values():
            value.pop("default", None)
            value.pop("description", None)
            value.pop("first_week", None)
        for name in POLICY_KEYS & properties.keys():
            optional = [kind for kind in properties[name].get("anyOf", ()) if kind == NULL]
            properties[name] = {"anyOf": [*POLICY, *optional]}
        definition.pop("description", None)
        if not definition.get("required"):
            definition.pop("required", None)
    return definitions


def as_text(value: Any, indent: int = 0, used: int = 0) -> str:
    """JSON with all on one line that fits on one; used: columns that its key and comma take."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + used + len(line) <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        names = {name: json.dumps(name) + ": " for name in value}
        rows = [names[k] + as_text(v, indent + 2, len(names[k]) + 1) for k, v in value.items()]
        opening, closing = "{", "}"
    else:
        rows = [as_text(v, indent + 2, 1) for v in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(rows) + f"\n{' ' * indent}{closing}"


def main() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    schema["$defs"] = config_definitions()
    SCHEMA_FILE.write_text(as_text(schema) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
