"""What a client with a key may name of the engines' own plane, however it writes it."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway import engine_plane
from router.gateway.exchange import Exchange, forwarded
from router.net.keys.identity import Allowance, Identity
from router.net.keys.rights import ALL, Right
from router.request.bodies import PATHS
from router.request.refusal import Reason, Refusal

BOUND = Identity("a", ALL - {Right.ENGINE_FIELDS}, "acme", models=("m", "m-*"))
TRUSTED = Identity("b", ALL, models=("m", "m-*"))
SOME = st.integers() | st.text(max_size=5) | st.just({}) | st.just([]) | st.just({"a": [1]})


def escaped(name: str, rng: random.Random) -> str:
    return "".join(f"\\u{ord(c):04x}" if rng.random() < 0.4 else c for c in name)


def body(rng: random.Random, *members: tuple[str, Any]) -> bytes:
    """A chat with these members among its own, their names escaped at random."""
    every = [("model", "m"), ("messages", [{"role": "user", "content": "x"}]), *members]
    text = ",".join(f'"{escaped(key, rng)}": {json.dumps(value)}' for key, value in every)
    return f"{{{text}}}".encode()


def is_denied(content: bytes, identity: Identity, path: str = "/v1/chat/completions") -> bool:
    try:
        Exchange(path, content, {}, identity=identity).check_rights()
    except Refusal as refusal:
        return refusal.reason is Reason.PERMISSION_DENIED
    return False


@settings(max_examples=400)
@given(
    st.sampled_from(engine_plane.FIELDS),
    SOME,
    st.lists(SOME | st.none(), max_size=2),
    st.sampled_from(sorted(PATHS)),
    st.randoms(use_true_random=False),
)
def test_a_field_of_the_plane_needs_the_right_however_it_is_written(
    name: str, value: object, before: list[object], path: str, rng: random.Random
) -> None:
    content = body(rng, *((name, each) for each in before), (name, value))
    assert is_denied(content, BOUND, path)
    assert not is_denied(content, TRUSTED, path)


@settings(max_examples=200)
@given(st.sampled_from(sorted(engine_plane.NESTED_FIELDS)), SOME, st.randoms(use_true_random=False))
def test_a_field_of_the_plane_within_vllms_arguments_needs_it_too(
    name: str, value: object, rng: random.Random
) -> None:
    inner = f'{{"harmless": 1, "{escaped(name, rng)}": {json.dumps(value)}}}'
    content = b'{"model": "m", "vllm_xargs": %b}' % inner.encode()
    assert is_denied(content, BOUND)
    assert not is_denied(content, TRUSTED)
    assert not is_denied(b'{"model": "m", "vllm_xargs": {"harmless": 1}}', BOUND)
    large = b'{"model": "m", "vllm_xargs": {"x": "%b"}}' % (b"x" * 100_000)
    assert is_denied(large, BOUND), "unread, and so not let through"


@settings(max_examples=300)
@given(
    st.text(max_size=6) | st.sampled_from(["m", "m-1", "secret", "M"]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_an_adapter_counts_as_a_model(
    name: str, in_list: bool, after_good: bool, rng: random.Random
) -> None:
    value = [None, "m", name] if in_list else name
    members = [("lora_path", "m")] * after_good + [("lora_path", value)]
    is_allowed = name == "m" or name.startswith("m-")
    assert is_denied(body(rng, *members), BOUND) is not is_allowed


@pytest.mark.parametrize("value", [[["secret"]], {"a": "secret"}, 7, ["m"] * 100_000])
def test_an_adapter_that_cant_be_read_is_none_of_the_keys_models(value: object) -> None:
    assert is_denied(body(random.Random(1), ("lora_path", value)), BOUND)


def test_null_is_absent_as_for_the_engines() -> None:
    nulls = dict.fromkeys((*engine_plane.FIELDS, "lora_path", "vllm_xargs"))
    assert not is_denied(json.dumps({"model": "m", **nulls}).encode(), BOUND)


def test_a_body_is_read_as_engines_read_it_when_a_model_is_there_twice() -> None:
    assert is_denied(b'{"model": "m", "\\u006dodel": "secret"}', BOUND)
    assert not is_denied(b'{"model": "secret", "\\u006dodel": "m"}', BOUND)


@given(
    st.sampled_from(sorted(engine_plane.HEADERS))
    | st.from_regex(r"x-override-[a-z-]{1,9}", fullmatch=True)
)
def test_no_header_of_the_plane_goes_on(name: str) -> None:
    kept = forwarded([(name.title(), "1"), ("x-dynamo-session-id", "s")])
    assert kept == {"x-dynamo-session-id": "s"}


NAMES = st.sampled_from(["", "a", "b", "ab"])


@given(st.lists(st.tuples(NAMES, NAMES, NAMES, NAMES), min_size=2, max_size=5, unique=True))
def test_a_salt_by_tenant_is_the_same_for_router_and_engine_and_nobody_elses(
    cases: list[tuple[str, str, str, str]],
) -> None:
    owners: dict[str, tuple[str, str, str]] = {}
    for name, tenant, claimed, salt in cases:
        identity = Identity(name, tenant=tenant) if name else None
        content = json.dumps({"cache_salt": salt} if salt else {}).encode()
        headers = {"X-Tenant-Id": claimed}
        one = Exchange(
            "/v1/chat/completions", content, headers, identity=identity, salts_tenants=True
        )
        routed = one.question().get("cache_salt", "")
        assert routed == json.loads(one.upstream("http://w", {}).body).get("cache_salt", "")
        of_tenant = (tenant if identity else "") or claimed
        owner = ("" if identity is None or tenant else name, of_tenant, salt)
        if any(owner[:2]):
            assert owners.setdefault(routed, owner) == owner
        else:
            assert routed == salt, "of nobody's, the client's own"


@given(st.integers(-(1 << 31) + 1, (1 << 31) - 1), st.none() | st.integers(-5, 5), st.booleans())
def test_a_priority_is_at_most_what_the_key_may_have(
    wanted: int, most: int | None, by_header: bool
) -> None:
    identity = Identity("a", limits=Allowance(priority=most))
    headers = {"X-Priority": str(wanted)} if by_header else {}
    content = b"{}" if by_header else b'{"priority": %d}' % wanted
    for path in PATHS:
        mine = Exchange(path, content, headers, identity=identity)
        assert mine.question()["priority"] == min(wanted, most or 0)
        sent = json.loads(mine.upstream("http://w", {}, engine_priority=None).body)
        assert "priority" not in sent, "the engine's comes from the pick alone"
        assert Exchange(path, content, headers).question()["priority"] == wanted
