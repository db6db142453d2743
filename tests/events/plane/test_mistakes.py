"""A mistake in settings is named with its remedy: the nearest key, the values that there are."""

import re
from typing import Literal, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.plane.mistakes import nearest, of_value
from router.config.keys import Key, keys
from router.config.settings.configurations import (
    GatewayConfig,
    PickerConfig,
    RelayConfig,
    ServeConfig,
)
from router.net.keys.key_ring import KeyFile

CONFIGS = (ServeConfig, RelayConfig, GatewayConfig, PickerConfig)
KEYS = [(config, key) for config in CONFIGS for key in keys(config)]


def sentence(config: type[msgspec.Struct], tree: object) -> str:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(tree, config)
    return of_value(error.value, config)


def nested(path: tuple[str, ...], value: object) -> object:
    for name in reversed(path):
        value = {name: value}
    return value


@given(st.sampled_from(KEYS), st.data())
def test_a_mistyped_key_is_followed_by_a_key_that_stands_there(
    place: tuple[type[msgspec.Struct], Key], data: st.DataObject
) -> None:
    config, key = place
    name, section = key.path[-1], key.path[:-1]
    i = data.draw(st.integers(1, max(1, len(name) - 2)))
    swapped = name[:i] + name[i + 1 : i + 2] + name[i : i + 1] + name[i + 2 :]
    wrong = data.draw(
        st.sampled_from([name[:i] + name[i + 1 :], name + "s", swapped, name.upper()])
    )
    beside = {one.path[-1] for one in keys(config) if one.path[:-1] == section} | {
        one.path[len(section)] for one in keys(config) if one.path[: len(section)] == section
    }
    if wrong in beside:
        return
    said = sentence(config, nested((*section, wrong), 1))
    where = "".join(f".{one}" for one in section)
    assert said.startswith(f"unknown key `{wrong}`")
    assert said.endswith(f" - at `${where}`")
    if len(wrong) > 3:
        hint = re.search(r"did you mean `(\w+)`\?", said)
        assert hint is not None
        assert hint[1] in beside


@pytest.mark.parametrize(
    "place",
    [one for one in KEYS if get_origin(one[1].type) is Literal],
    ids=lambda one: one[1].flag,
)
def test_a_value_out_of_a_list_is_followed_by_the_list(
    place: tuple[type[msgspec.Struct], Key],
) -> None:
    config, key = place
    said = sentence(config, nested(key.path, "no such value"))
    for value in key.type.__args__:
        assert f"{value}" in said
    assert said.startswith("'no such value' is none of ")
    assert said.endswith(f" - at `$.{key.dotted}`")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"worker": []}, "unknown key `worker`, did you mean `workers`? - at `$`"),
        (
            {"workers": [{"id": "a", "engine": "tgi", "address": "http://a"}]},
            "'tgi' is none of vllm, sglang, trtllm - at `$.workers[0].engine`",
        ),
        (
            {"workers": [{"id": "a", "engine": "vlm", "address": "http://a"}]},
            "'vlm' is none of vllm, sglang, trtllm, did you mean `vllm`?"
            " - at `$.workers[0].engine`",
        ),
        (
            {"workers": [{"id": "a", "engine": "vllm", "adress": "http://a"}]},
            "unknown key `adress`, did you mean `address`? - at `$.workers[0]`",
        ),
        (
            {"models": [{"name": "a", "prompts": {"source": "lokal"}}]},
            "'lokal' is none of auto, local, engine, off, did you mean `local`?"
            " - at `$.models[0].prompts.source`",
        ),
        (
            {"models": [{"name": "a", "routing": {"polcy": "x"}}]},
            "unknown key `polcy`, did you mean `policy`? - at `$.models[0].routing`",
        ),
        ({"zzz": 1}, "unknown key `zzz` - at `$`"),
    ],
)
def test_mistakes_in_lists_are_named_too(tree: object, said: str) -> None:
    assert sentence(ServeConfig, tree) == said


def test_rights_of_a_key_file_are_listed() -> None:
    tree = {"identities": [{"name": "a", "tokens": [], "rights": ["rout"]}]}
    said = sentence(KeyFile, tree)
    assert "did you mean `route`?" in said


@given(st.text(), st.text())
def test_any_name_in_any_place_is_a_sentence(name: str, other: str) -> None:
    assert sentence(ServeConfig, {f"x{name}": other}).startswith("unknown key `x")
    assert isinstance(nearest(name, [other, "policy"]), str)
