"""Fields of a body by name, however they are written: what is read of them, cut out and put in."""

import json
import random
import tracemalloc
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw, UnsetType

from router.gateway.refusals import GatewayRefusal
from router.gateway.top_level import REPEATS_MAX, changed, decoded, span

NAMES = ("priority", "stream_options", "kv_transfer_params", "lora_path", "model")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
MEMBERS = st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=4), VALUES), max_size=8)
SPACES = st.text(" \t\r\n", max_size=3)


def written(members: list[tuple[str, Any]], rng: random.Random, space: str) -> bytes:
    """An object with these members, its names escaped at random."""

    def name(text: str) -> str:
        shown = (f"\\u{ord(c):04x}" if ord(c) < 128 and rng.random() < 0.3 else c for c in text)
        return '"' + "".join(c if len(c) > 1 else json.dumps(c)[1:-1] for c in shown) + '"'

    of_all = (
        f"{space}{name(key)}{space}:{space}{json.dumps(value)}{space}" for key, value in members
    )
    return f"{space}{{{','.join(of_all) or space}}}{space}".encode(errors="surrogatepass")


@settings(max_examples=500)
@given(MEMBERS, st.randoms(use_true_random=False), SPACES, st.sets(st.sampled_from(NAMES)))
def test_a_change_is_the_same_as_in_an_object_of_python(
    members: list[tuple[str, Any]], rng: random.Random, space: str, out: set[str]
) -> None:
    fields: dict[str, Any] = dict.fromkeys(sorted(out), UNSET) | {"new": {"a": [1]}}
    body = written(members, rng, space)
    repeats = Counter(key for key, _ in members if key in fields)
    if any(count > REPEATS_MAX for count in repeats.values()):
        with pytest.raises(GatewayRefusal, match=f"more than {REPEATS_MAX} times"):
            changed(body, fields)
        return
    expected = [(key, value) for key, value in members if key not in fields]
    seen: list[tuple[str, Any]] = json.loads(
        changed(body, fields), object_pairs_hook=lambda pairs: pairs
    )
    as_pairs = json.loads(json.dumps([value for _, value in expected]), object_pairs_hook=list_of)
    assert [key for key, _ in seen] == ["new", *(key for key, _ in expected)]
    assert repr([list_of_all(value) for _, value in seen[1:]]) == repr(list_of_all(as_pairs))


def list_of(pairs: list[tuple[str, Any]]) -> list[Any]:
    return [list(pair) for pair in pairs]


def list_of_all(value: Any) -> Any:
    return [list_of_all(each) for each in value] if isinstance(value, (list, tuple)) else value


@settings(max_examples=500)
@given(MEMBERS, st.randoms(use_true_random=False), SPACES)
def test_what_is_read_of_a_name_is_what_pythons_parser_reads(
    members: list[tuple[str, Any]], rng: random.Random, space: str
) -> None:
    body = written(members, rng, space)
    found, within = decoded(DECODER, body)
    of_python = json.loads(body)
    for name in NAMES:
        value = getattr(found, name)
        assert (value is not UNSET) is (name in of_python)
        if value is not UNSET:
            start, end = span(value, within)
            assert repr(json.loads(body[start:end])) == repr(of_python[name])


DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("Names", [(name, Raw | UnsetType, UNSET) for name in NAMES])
)


@pytest.mark.parametrize("count", [1, REPEATS_MAX, REPEATS_MAX + 1])
def test_a_field_is_cut_out_as_often_as_it_is_there_up_to_a_bound(count: int) -> None:
    body = b"{" + b",".join(b'"priority": %d' % number for number in range(count)) + b', "a": 1}'
    if count <= REPEATS_MAX:
        assert json.loads(changed(body, {"priority": UNSET})) == {"a": 1}
        return
    with pytest.raises(GatewayRefusal, match=f"more than {REPEATS_MAX} times"):
        changed(body, {"priority": UNSET})


def test_a_change_makes_no_object_for_each_of_many_fields() -> None:
    body = b'{"priority":7,' + b",".join(b'"k%d":1' % number for number in range(100_000)) + b"}"
    tracemalloc.start()
    try:
        new = changed(body, {"priority": UNSET})
        assert tracemalloc.get_traced_memory()[1] < 6 * len(body), "copies of the bytes alone"
    finally:
        tracemalloc.stop()
    assert new == b"{" + body[14:]


@settings(max_examples=300)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_bytes_that_are_no_object_are_refused(body: bytes) -> None:
    try:
        is_object = isinstance(json.loads(body.decode()), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        with pytest.raises(GatewayRefusal):
            decoded(DECODER, body)
