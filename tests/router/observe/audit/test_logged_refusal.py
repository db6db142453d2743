"""Logged refusals: why, of what was asked the outline, and what other policies can be asked."""

from math import nan
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import pack_tokens
from kvroute.v1 import router_pb2
from router.api.desk.request_codec import read_refused
from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores
from router.observe.audit.logged_decision import candidates, encode, reasons
from router.observe.audit.logged_refusal import LoggedRefusal, capture_refusal, decode
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import START_S, Fleet, prompt

SECRET = pack_tokens([73_657, 63_726])


def refused(fleet: Fleet, **about: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        fleet.core.route(fleet.request(prompt(100), **about), fleet.now_s)
    return caught.value


def line_of(refusal: Refusal, *, hashes: bool = False, **asked: Any) -> LoggedRefusal:
    """As it is read again."""
    request = router_pb2.RouteRequest(**{"token_bytes": SECRET} | asked)
    seen = read_refused(request.SerializeToString(), refusal, START_S, 1 << 20)
    line = decode(encode(capture_refusal(seen, "here", hashes)))
    assert isinstance(line, LoggedRefusal)
    return line


def full_fleet() -> Fleet:
    fleet = Fleet()
    fleet.add("full", total_slots=2, running=2)
    fleet.add("other", role="decode")
    fleet.add("away")
    fleet.core.drain("away")
    return fleet


def test_a_line_tells_why_and_what_was_asked() -> None:
    line = line_of(
        refused(full_fleet()),
        request_id="r",
        model="m",
        policy="ttft",
        expected_output_tokens=9,
        phase=router_pb2.PHASE_PREFILL,
        required_labels={"gpu": "h100"},
        excluded_worker_ids=["a", "b"],
    )
    assert (line.reason, line.request_id, line.model) == ("ALL_WORKERS_FULL", "r", "m")
    assert (line.role, line.policy, line.prompt_tokens, line.output_tokens) == (
        "prefill", "ttft", 2, 9,
    )  # fmt: skip
    assert line.entries == {"required_labels": 1, "excluded_worker_ids": 2}
    assert (line.at_s, line.replica) == (START_S, "here")
    assert line.exclusions == {"full": 1, "drained": 1, "role is decode": 1}
    assert line.decision is not None
    assert sorted(filter(None, reasons(line.decision))) == ["drained", "full", "role is decode"]
    assert candidates(line.decision).prompt_tokens == 100


def test_workers_that_are_not_live_count_though_nobody_is_scored() -> None:
    fleet = Fleet()
    fleet.add("w0")
    fleet.turn(5.0, silent=[next(iter(fleet.relays))])
    line = line_of(refused(fleet))
    assert (line.reason, line.exclusions, line.decision) == ("NO_WORKER", {"silent": 1}, None)


def test_a_line_names_no_prompt_session_or_tenant() -> None:
    fleet = Fleet()
    fleet.add("w0")
    fleet.core.fleet.sessions.put(
        "secret", fleet.route(prompt(32)).reservation, 16, "", fleet.now_s
    )
    refusals = [
        refused(full_fleet()),
        Refusal(Reason.UNKNOWN_SESSION, "nobody holds session 'secret' any more"),
    ]
    for hashes in (False, True):
        for refusal in refusals:
            line = line_of(refusal, hashes=hashes, session_id="secret", tenant="secret",
                           cache_salt="secret", required_labels={"secret": "secret"})  # fmt: skip
            text = encode(line).decode()
            assert "secret" not in text
            assert "73657" not in text
            assert ("prefixes" in text) == (hashes and line.decision is not None)


def test_what_is_no_request_leaves_the_reason() -> None:
    refusal = Refusal(Reason.INVALID_FIELD, "no RouteRequest")
    seen = read_refused(b"\xff", refusal, START_S, 1 << 20)
    told = msgspec.to_builtins(capture_refusal(seen, "here", hashes=False))
    assert told == {"v": 1, "at_s": START_S, "replica": "here", "reason": "INVALID_FIELD"}


def test_texts_are_as_long_as_they_may_be_and_no_longer() -> None:
    refusal = Refusal(Reason.INVALID_FIELD, "request_id is longer than 1024 characters")
    assert len(line_of(refusal, request_id="x" * 1025).request_id) == 1024


def test_rows_without_a_cost_are_told_from_rows_that_nobody_can_take() -> None:
    def score(rows: Candidates, _: Parameters) -> Scores:
        return Scores(np.full(len(rows), nan))

    fleet = full_fleet()
    fleet.add("w0")
    fleet.core.policies["broken"] = Policy("broken", "", "", Parameters(), score)
    line = line_of(refused(fleet, policy="broken"))
    assert line.exclusions["cost is not a number"] == 1


@pytest.mark.parametrize("wrong", [{"v": 2}, {"reason": 7}, {"exclusions": 1}, {"decision": {}}])
def test_a_line_that_does_not_hold_together_is_refused(wrong: dict[str, Any]) -> None:
    told = msgspec.json.decode(WHOLE)
    decode(msgspec.json.encode(told))
    with pytest.raises(ValueError, match=r"."):
        decode(msgspec.json.encode(told | wrong))


def test_a_refusal_that_names_a_pick_is_refused() -> None:
    told = msgspec.json.decode(WHOLE)
    told["decision"]["picked"] = 0
    with pytest.raises(ValueError, match="of a refusal, but has a pick"):
        decode(msgspec.json.encode(told))
    with pytest.raises(ValueError, match="without a pick"):
        decode(msgspec.json.encode(told["decision"] | {"picked": None}))


@given(st.integers(0, 4000))
def test_torn_lines_are_refused(at: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(WHOLE[: min(at, len(WHOLE) - 2)])


WHOLE = encode(line_of(refused(full_fleet())))
