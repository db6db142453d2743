"""Reads a file about a decision: a receipt, an answer with one or two, a line of the decision log.

JSON, as grpcurl and `kvroute explain --json` print it, or protobuf's own bytes. Pure.
"""

import json
from contextlib import suppress
from typing import Any, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from kvroute.v1 import router_pb2
from router.observe.audit import logged_refusal
from router.observe.audit.logged_decision import LoggedDecision
from router.observe.audit.logged_refusal import LoggedRefusal


class Receipts(NamedTuple):
    """The receipts of one request: that of its answer, and that of a pair's prefill worker."""

    answer: router_pb2.Receipt
    prefill: router_pb2.Receipt | None = None
    """Receipt of a pair's prefill worker; None: there is none."""


def read_receipts(content: bytes) -> Receipts | LoggedDecision:
    """The decision in a file's bytes. Raises ValueError, which describes any other content."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith(b"{"):
            raise ValueError(f"no receipt: {_broken(content, error)}") from error
        return _of_bytes(content)
    if not isinstance(tree, dict):
        raise ValueError("no receipt: a receipt in JSON must be an object")
    if "v" in tree:
        return _of_line(content)
    receipts = {key for key in ("receipt", "prefillReceipt", "prefill_receipt") if key in tree}
    if "receipt" in receipts:
        others = receipts - {"receipt"}
        prefill = _of_dict(tree[others.pop()]) if others else None
        return Receipts(_of_dict(tree["receipt"]), prefill)
    if receipts:
        raise ValueError("no receipt: a pair's prefill_receipt without the receipt of its answer")
    if "reservationId" in tree or "reservation_id" in tree:
        raise ValueError("an answer without a receipt: its request had set omit_receipt")
    if "picked" not in tree and "formula" not in tree:
        raise ValueError(f"no receipt: the JSON has {_some(tree)}")
    return Receipts(_of_dict(tree))


def _broken(content: bytes, error: Exception) -> str:
    lines = len(content.split(b"\n")) - content.endswith(b"\n")
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
        return f"several JSON values in {lines} lines; give one of them"
    return f"JSON that breaks off or is invalid ({error})"


def _some(tree: dict[str, Any]) -> str:
    names = ", ".join(list(tree)[:5])
    return f"{names} but no receipt" if names else "nothing in it"


def _of_dict(tree: object) -> router_pb2.Receipt:
    receipt = router_pb2.Receipt()
    if not isinstance(tree, dict):
        raise ValueError("no receipt: a receipt in JSON must be an object")
    try:
        json_format.ParseDict(tree, receipt, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ValueError(f"no receipt: {error}") from error
    return receipt


def _of_line(content: bytes) -> LoggedDecision:
    try:
        line = logged_refusal.decode(content)
    except ValueError as error:
        raise ValueError(
            f"the file has neither a receipt nor a line of the decision log: {error}"
        ) from error
    if isinstance(line, LoggedRefusal):
        raise ValueError(f"the line is of a refusal ({line.reason}): no worker was picked")
    return line


def _of_bytes(content: bytes) -> Receipts:
    # An answer is tried first: no other message has a receipt in the field of an answer's receipt.
    for kind in (router_pb2.RouteResponse, router_pb2.Explanation):
        message = kind()
        try:
            message.ParseFromString(content)
        except DecodeError:
            continue
        if _is_one(message.receipt):
            prefill = message.prefill_receipt if message.HasField("prefill_receipt") else None
            return Receipts(message.receipt, prefill)
    receipt = router_pb2.Receipt()
    with suppress(DecodeError):  # the error below covers all other bytes
        receipt.ParseFromString(content)
    if not _is_one(receipt):
        raise ValueError(
            "the file is neither JSON nor the bytes of a receipt, an answer or an explanation"
        )
    return Receipts(receipt)


def _is_one(receipt: router_pb2.Receipt) -> bool:
    return receipt.HasField("picked") and bool(receipt.formula)
