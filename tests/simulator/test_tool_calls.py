"""Arguments of forced tool calls, by the function's schema."""

import json
from typing import Any

import pytest

from simulator.live.completion_wire import ChatRequest, Message, Tool
from simulator.live.tool_calls import READ_MAX, Function, UnfitChoice, forced_call


def arguments(**schema: Any) -> Any:
    return json.loads(forced_call([Function("f", schema)], None).arguments)


def referring(count: int, **place: Any) -> dict[str, Any]:
    """A schema of so many required properties, all of which are one Place."""
    names = [f"p{number}" for number in range(count)]
    properties = {name: {"$ref": "#/$defs/Place"} for name in names}
    return {"properties": properties, "required": names, "$defs": {"Place": place}}


def test_references_are_followed_as_far_as_they_are_deep() -> None:
    place = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/Place"}}}
    made = arguments(**referring(2, **place, required=["inner"]))
    nested = {"inner": {"inner": {"inner": {"inner": None}}}}
    assert made == {"p0": nested, "p1": nested}


@pytest.mark.parametrize("enum", [{"celsius": 1}, 5, True, "celsius", [], None])
def test_choices_that_are_no_list_are_ignored(enum: Any) -> None:
    properties = {"unit": {"enum": enum, "type": "string"}}
    assert arguments(properties=properties, required=["unit"]) == {"unit": "text"}


@pytest.mark.parametrize(
    "place",
    [
        referring(30) | {"type": "object"},
        {"const": "x" * (READ_MAX // 20)},
        {"enum": ["x" * (READ_MAX // 20)]},
        {"type": "object", "required": [0] * (READ_MAX // 20)},
        {"type": "number", "minimum": "9" * (READ_MAX // 20)},
        {"$ref": "#" + "/a" * (READ_MAX // 20)},
    ],
    ids=["objects", "constants", "choices", "names", "numbers", "references"],
)
def test_a_schema_that_refers_to_much_many_times_is_refused(place: dict[str, Any]) -> None:
    with pytest.raises(UnfitChoice, match=f"more than {READ_MAX} characters"):
        arguments(**referring(30, **place))


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({}, (16, "tool_calls")),
        ({"max_tokens": 5}, (5, "length")),
        ({"max_tokens": 1000, "max_completion_tokens": 5}, (5, "length")),
        ({"max_tokens": 5, "max_completion_tokens": 1000}, (16, "tool_calls")),
    ],
)
def test_a_call_is_cut_by_max_completion_tokens_else_by_max_tokens(
    limits: dict[str, Any], limit: tuple[int, str]
) -> None:
    schema = {"properties": {"at": {"const": "a place"}}, "required": ["at"]}
    request = ChatRequest(
        messages=[Message("user", "Where?")],
        tools=[Tool(Function("f", schema))],
        tool_choice="required",
        **limits,
    )
    assert request.limit() == limit
