"""Laws of trust in the router's own tokens."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.proving.proof import (
    OTHER,
    PROVEN_AFTER,
    SHAPES_MAX,
    TARGETS_MAX,
    Difference,
    Proof,
    State,
    Target,
    first_difference,
)

VLLM, SGLANG = Target("vllm", "0.32.0"), Target("sglang", "0.5.23")


def tokens(*ids: int) -> bytes:
    return array("I", ids).tobytes()


SAME = tokens(1, 2, 3), tokens(1, 2, 3)


@pytest.mark.parametrize(
    ("own", "engine", "difference"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), Difference(1, 2, 3)),
        ((1,), (1, 3), Difference(1, 0, 3)),
        ((7, 8), (), Difference(0, 7, 0)),
    ],
)
def test_the_first_difference_is_named(
    own: tuple[int, ...], engine: tuple[int, ...], difference: Difference | None
) -> None:
    assert first_difference(tokens(*own), tokens(*engine)) == difference


def test_equal_bodies_in_a_row_prove_their_shape_on_their_engine_alone() -> None:
    proof = Proof()
    for _ in range(PROVEN_AFTER):
        assert proof.state("m", VLLM, "chat") is State.UNPROVEN
        assert proof.compare("m", VLLM, "chat", *SAME) is None
    assert proof.state("m", VLLM, "chat") is State.PROVEN
    assert proof.state("m", SGLANG, "chat") is State.UNPROVEN
    assert proof.state("m", VLLM, "chat+tools") is State.UNPROVEN
    assert proof.state("other", VLLM, "chat") is State.UNPROVEN


def test_a_count_that_is_equal_proves_nothing_and_another_bars() -> None:
    proof = Proof()
    for _ in range(PROVEN_AFTER):
        assert proof.count("m", VLLM, "chat", 3, 3) is None
    assert proof.state("m", VLLM, "chat") is State.UNPROVEN
    assert proof.count("m", VLLM, "chat", 3, 4) == Difference(None, 3, 4)
    assert proof.barred("m") == [(VLLM, "chat", Difference(None, 3, 4))]


def test_a_barred_shape_stays_barred_until_all_canaries_pass() -> None:
    proof = Proof()
    proof.compare("m", VLLM, "chat", tokens(1), tokens(2))
    for _ in range(2 * PROVEN_AFTER):
        proof.compare("m", VLLM, "chat", *SAME)
        proof.unprove("m")
    assert proof.state("m", VLLM, "chat") is State.BARRED
    proof.canaries("m", VLLM, {"chat+tools": [SAME], "chat+system": [(tokens(1), tokens(9))]})
    assert proof.state("m", VLLM, "chat") is State.BARRED
    assert proof.state("m", VLLM, "chat+tools") is State.PROVEN
    assert proof.state("m", VLLM, "chat+system") is State.BARRED
    proof.canaries("m", VLLM, {"chat+tools": [SAME]})
    assert proof.state("m", VLLM, "chat") is State.UNPROVEN
    assert not proof.barred("m")


DIFFERENT = tokens(1, 2, 3), tokens(1, 9)


@pytest.mark.parametrize("order", [("same", "odd"), ("odd", "same")])
def test_a_worker_whose_canaries_differ_from_another_s_is_odd_and_bars_nothing(
    order: tuple[str, ...],
) -> None:
    proof = Proof()
    proof.compare("m", VLLM, "chat+tools", *DIFFERENT, "odd")  # before its canaries end
    for worker in order:
        proof.canaries("m", VLLM, {"chat": [SAME if worker == "same" else DIFFERENT]}, worker)
    difference = Difference(1, 2, 9)
    assert proof.odd("m", VLLM, "odd") == [(VLLM, "chat", difference)]
    assert not proof.odd("m", VLLM, "same")
    assert not proof.odd("m", SGLANG, "odd")
    assert proof.state("m", VLLM, "chat") is State.PROVEN
    assert proof.state("m", VLLM, "chat+tools") is State.UNPROVEN
    assert proof.compare("m", VLLM, "chat", *DIFFERENT, "odd") == difference
    assert proof.count("m", VLLM, "chat", 3, 4, "odd") == Difference(None, 3, 4)
    assert not proof.barred("m")
    proof.count("m", VLLM, "chat", 3, 4, "same")
    assert proof.state("m", VLLM, "chat") is State.BARRED


def test_a_worker_is_odd_no_longer_than_its_canaries_differ_and_another_s_are_equal() -> None:
    proof = Proof()
    for worker, pair in (("w0", SAME), ("w1", DIFFERENT)):
        proof.canaries("m", VLLM, {"chat": [pair]}, worker)
    assert proof.odd("m", VLLM, "w1")
    proof.canaries("m", VLLM, {}, "w1")  # it gave no tokens
    assert proof.odd("m", VLLM, "w1")
    proof.canaries("m", VLLM, {"chat": [SAME]}, "w1")
    assert not proof.odd("m", VLLM, "w1")
    for worker in ("w0", "w1"):
        proof.canaries("m", VLLM, {"chat": [DIFFERENT]}, worker)
    assert not proof.odd("m", VLLM, "w1")
    assert proof.state("m", VLLM, "chat") is State.BARRED
    proof.canaries("m", VLLM, {"chat": [SAME]}, "w0")
    assert proof.odd("m", VLLM, "w1")
    proof.unprove("m")
    assert not proof.odd("m", VLLM, "w1")


def test_the_canaries_of_so_many_workers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.request.proving.proof.WORKERS_MAX", 2)
    proof = Proof()
    for worker, pair in (("w0", SAME), ("w1", DIFFERENT)):
        proof.canaries("m", VLLM, {"chat": [pair]}, worker)
    proof.canaries("m", VLLM, {"chat": [DIFFERENT]}, "w2")  # w0 is forgotten
    assert not proof.odd("m", VLLM, "w1")
    assert not proof.odd("m", VLLM, "w2")
    assert proof.state("m", VLLM, "chat") is State.BARRED


def test_a_reload_takes_proofs_back() -> None:
    proof = Proof()
    proof.canaries("m", VLLM, {"chat": [SAME]})
    assert proof.state("m", VLLM, "chat") is State.PROVEN
    proof.unprove("m")
    assert proof.state("m", VLLM, "chat") is State.UNPROVEN


def test_shapes_and_engines_are_bounded_and_what_is_over_is_never_proven() -> None:
    proof = Proof()
    for number in range(SHAPES_MAX):
        assert proof.shape("m", f"s{number}") == f"s{number}"
    assert proof.shape("m", "one more") == OTHER
    assert proof.shape("m", "s0") == "s0"
    for _ in range(2 * PROVEN_AFTER):
        proof.compare("m", VLLM, OTHER, *SAME)
        proof.canaries("m", VLLM, {OTHER: [SAME]})
    assert proof.state("m", VLLM, OTHER) is State.UNPROVEN
    for number in range(2 * TARGETS_MAX):
        proof.compare("m", Target("vllm", str(number)), "s0", *SAME)
    assert len({target for _, target, _, _ in proof}) == TARGETS_MAX


BODIES = st.tuples(
    st.sampled_from([VLLM, SGLANG]), st.sampled_from(["a", "b"]), st.sampled_from("=!c#uk")
)


@given(st.lists(BODIES, max_size=60))
def test_proven_means_nothing_differed_since_enough_was_equal(
    steps: list[tuple[Target, str, str]],
) -> None:
    proof = Proof()
    equal: dict[tuple[Target, str], int] = {}
    barred: set[tuple[Target, str]] = set()
    for target, shape, what in steps:
        key = target, shape
        match what:
            case "=" | "!":
                engine = SAME[1] if what == "=" else tokens(9)
                proof.compare("m", target, shape, SAME[0], engine)
                equal[key] = equal.get(key, 0) + 1 if what == "=" else 0
                barred |= {key} if what == "!" else set()
            case "c":
                proof.count("m", target, shape, 3, 3)
            case "#":
                proof.count("m", target, shape, 3, 4)
                equal[key], barred = 0, barred | {key}
            case "u":
                proof.unprove("m")
                equal = {}
            case _:
                proof.canaries("m", target, {shape: [SAME]})
                for other in ("a", "b"):
                    if (target, other) in barred:
                        equal[target, other] = 0
                barred -= {(target, "a"), (target, "b")}
                equal[key] = equal.get(key, 0) + PROVEN_AFTER
        for one in [(VLLM, "a"), (VLLM, "b"), (SGLANG, "a"), (SGLANG, "b")]:
            state = proof.state("m", *one)
            assert (state is State.BARRED) == (one in barred)
            if state is State.PROVEN:
                assert equal.get(one, 0) >= PROVEN_AFTER


IDS = st.lists(st.integers(0, 3), max_size=40)


@given(IDS, IDS)
def test_a_difference_is_the_first_place_where_tokens_are_not_the_same(
    own: list[int], engine: list[int]
) -> None:
    difference = first_difference(tokens(*own), tokens(*engine))
    if difference is None:
        assert own == engine
        return
    at = difference.at
    assert at is not None
    assert own[:at] == engine[:at]
    assert own[at : at + 1] != engine[at : at + 1]
    assert difference == (at, *((ids[at : at + 1] or [0])[0] for ids in (own, engine)))
