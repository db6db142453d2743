"""Receipts as people keep them: read in every form, and shown by the command line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from google.protobuf import json_format
from google.protobuf.message import Message

from kvroute.v1 import router_pb2
from router.app.main import cli
from router.decide.decision.decision import Decision
from router.decide.policies import POLICIES
from router.observe.audit.logged_decision import LoggedDecision, capture, encode
from router.observe.audit.logged_refusal import capture_refusal
from router.observe.audit.receipt_file import Receipts, read_receipts
from router.observe.audit.recompute_line import check_line
from router.observe.audit.recompute_receipt import FormulaError
from router.request.refusal import Reason, Refusal, Refused
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt


def pair(tokens: int = 640, **about: Any) -> router_pb2.RouteResponse:
    """The answer of a pair among two workers of each half."""
    fleet = Fleet(**about)
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        fleet.add(name, role=role)
    return answer(fleet, tokens, role=Role.PAIR)


def answer(fleet: Fleet, tokens: int = 640, **about: Any) -> router_pb2.RouteResponse:
    return fleet.answer(prompt(tokens), **about)


def explained(told: router_pb2.RouteResponse) -> router_pb2.Explanation:
    prefill = told.prefill_receipt if told.HasField("prefill_receipt") else None
    return router_pb2.Explanation(worker_id="w", receipt=told.receipt, prefill_receipt=prefill)


def plain() -> router_pb2.RouteResponse:
    fleet = Fleet(policy="ttft")
    fleet.add("w0")
    fleet.cache(fleet.add("w1"), prompt(320))
    return answer(fleet)


def line(policy: str = "ttft", *, hashes: bool = True, **about: Any) -> LoggedDecision:
    """Of workers that differ."""
    told: list[LoggedDecision] = []

    def see(decision: Decision) -> None:
        told.append(capture(decision, "here", hashes))

    fleet = Fleet(policy=policy, **about)
    for i in range(4):
        key = fleet.add(f"w{i}", running=i, waiting=3 - i, used_blocks=200.0 * i)
        fleet.cache(key, prompt(640), 160 * i)
    fleet.core.drain("w2")
    fleet.core.route(fleet.request(prompt(640)), fleet.now_s, watch=see)
    return told[0]


def shown(content: bytes, folder: Path) -> Result:
    """What `kvroute explain --receipt` says of a file."""
    file = folder / "kept"
    file.write_bytes(content)
    return CliRunner().invoke(cli, ["explain", "--receipt", str(file)])


@pytest.mark.parametrize("told", [plain(), pair(), pair(96)], ids=["plain", "remote", "local"])
def test_answers_and_explanations_are_read_with_all_their_receipts(
    told: router_pb2.RouteResponse,
) -> None:
    prefill = told.prefill_receipt if told.HasField("prefill_receipt") else None
    for message in (told, explained(told)):
        for content in written(message):
            assert read_receipts(content) == Receipts(told.receipt, prefill)
    for receipt in filter(None, (told.receipt, prefill)):
        for content in written(receipt):
            assert read_receipts(content) == Receipts(receipt)


def written(message: Message) -> list[bytes]:
    names = (True, False)
    texts = [json_format.MessageToJson(message, preserving_proto_field_name=one) for one in names]
    return [*(text.encode() for text in texts), message.SerializeToString()]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "neither JSON nor"),
        (b"\xff\xff", "neither JSON nor"),
        (b"nothing", "neither JSON nor"),
        (b"[]", "must be an object"),
        (b"3", "must be an object"),
        (b"{", "breaks off"),
        (b'{"a": 1}\n{"a": 2}\n', "several JSON values in 2 lines"),
        (b"{}", "nothing in it"),
        (b'{"name": 1, "age": 2}', "name, age"),
        (b'{"picked": 3}', "picked"),
        (b'{"receipt": 3}', "must be an object"),
        (b'{"receipt": {"picked": 3}}', "picked"),
        (b'{"reservationId": "a-1", "workerId": "w"}', "omit_receipt"),
        (b'{"prefillReceipt": {}}', "without the receipt"),
        (b'{"v": 1}', "decision log"),
    ],
)
def test_what_is_no_receipt_is_said_to_be_what_it_is(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_receipts(content)


def test_the_line_of_a_refusal_says_why() -> None:
    refused = Refused(Refusal(Reason.NO_WORKER, "nobody"), 7.0)
    content = encode(capture_refusal(refused, "here", hashes=False))
    with pytest.raises(ValueError, match="a refusal \\(NO_WORKER\\)"):
        read_receipts(content)


def test_both_receipts_of_a_pair_are_worked_out(tmp_path: Path) -> None:
    told = pair()
    result = shown(told.SerializeToString(), tmp_path)
    assert result.exit_code == 0
    assert result.output.count("It holds.") == 2
    assert "prefill-queue" in result.output
    assert "decode-room" in result.output
    told.prefill_receipt.picked.cost += 1.0
    result = shown(json_format.MessageToJson(told).encode(), tmp_path)
    assert result.exit_code == 1
    assert (result.output.count("It holds."), result.output.count("does not hold")) == (1, 1)


def test_a_pair_that_nobody_hands_over_in_has_one_receipt_that_counts(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.add("w0")
    fleet.add("w1")
    result = shown(answer(fleet, role=Role.PAIR).SerializeToString(), tmp_path)
    assert result.exit_code == 0
    assert "no worker can hand over" in result.output
    assert "excluded: 2 hands nothing over" in result.output
    assert result.output.count("It holds.") == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_line_of_the_log_is_worked_out(policy: str, tmp_path: Path) -> None:
    result = shown(encode(line(policy)), tmp_path)
    assert (result.exit_code, "It holds." in result.output) == (0, True)
    assert "excluded: 1 drained" in result.output


def test_a_line_is_worked_out_with_the_numbers_of_its_time() -> None:
    told = line(parameters={"ttft": {"stall": 7.0}})
    assert told.parameters["stall"] == 7.0
    assert check_line(told).complaints == []
    (*_, complaint) = check_line(msgspec.structs.replace(told, parameters={})).complaints
    assert "the line says" in complaint


def test_a_line_that_was_tampered_with_is_found_out() -> None:
    told = line("least-loaded")
    costs = [*told.costs[:3], 0.25]
    (complaint,) = check_line(msgspec.structs.replace(told, costs=costs)).complaints
    assert complaint.startswith("w3/0: the line says 0.25, least-loaded ")
    worst = max((0, 1, 3), key=lambda row: told.costs[row] or 0.0)
    (complaint,) = check_line(msgspec.structs.replace(told, picked=worst)).complaints
    assert complaint == "another worker is cheaper than the pick"
    (complaint,) = check_line(msgspec.structs.replace(told, picked=2)).complaints
    assert complaint == "the pick is marked as excluded: drained"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (line("session-sticky", hashes=False), "needs hashes"),
        (msgspec.structs.replace(line(), policy="mine:own"), "replay-log --policy mine:own"),
        (
            msgspec.structs.replace(line(), parameters={"host_rate": -1.0}),
            "parameters of policy ttft",
        ),
    ],
)
def test_what_cannot_be_worked_out_says_why(told: LoggedDecision, why: str, tmp_path: Path) -> None:
    with pytest.raises(FormulaError, match=why):
        check_line(told)
    result = shown(encode(told), tmp_path)
    assert (result.exit_code, why in result.output) == (1, True)


def test_a_torn_line_is_said_to_be_one(tmp_path: Path) -> None:
    whole = json.loads(encode(line()))
    del whole["workers"]
    result = shown(json.dumps(whole).encode(), tmp_path)
    assert (result.exit_code, "nor a line of the decision log" in result.output) == (1, True)
