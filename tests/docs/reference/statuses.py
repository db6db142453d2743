"""Every reason for which a request is refused, with its statuses."""

from kvroute.client.requests.failures import FAILURES, Kind
from kvroute.v1 import FailureReason
from router.gateway.refusals import STATUS as HTTP
from router.gateway.refusals import GatewayReason
from router.request.refusal import Reason
from tests.docs.reference.markdown import cell, code, plain, table

HEAD = """# Statuses

Every reason for a refusal, with its status in gRPC and in HTTP (at the gateway and the endpoint
picker) in brackets, made by `python -m tests.docs.reference`.

gRPC refusals carry the reason in `google.rpc.ErrorInfo` (domain `kvroute`), HTTP answers in
`X-Kvroute-Reason`. The Python client and the gateway try a request again after `UNAVAILABLE`, and
after `RESOURCE_EXHAUSTED` with `RetryInfo`, which only {without} lacks. Every 503 and every refusal
with `RetryInfo` has `Retry-After` in HTTP.
"""
FAILURES_HEAD = """## Failures of a request on its worker

By the gateway and by `RoutedRequest` and `Attempts` of the Python client. *Reported*: the
`FailureReason` in the report to the router; only `WORKER` and `TIMEOUT` count against the worker.
*Again*: while no byte of an answer was passed on, within three attempts and the retry budget; after
the first byte the answer is cut. *Answer*: the gateway's, if nothing is left to try.
"""
OTHERS = {
    **dict.fromkeys((Kind.FAILED, Kind.NO_MODEL, Kind.REJECTED), "the worker's own"),
    Kind.STALE: "that of the fresh connection",
    Kind.CANCELLED: "none",
}
"""Answers to the client that are none of the gateway's."""
NO_RETRY_INFO = {Reason.MESSAGE_TOO_LARGE}
"""Of RESOURCE_EXHAUSTED: another try would be refused as well."""


def page() -> str:
    lines = [HEAD.format(without=", ".join(map(code, NO_RETRY_INFO))), "## Of a router", ""]
    lines += [
        f"- `{reason}` ({reason.grpc_status}, {reason.http_status}): {plain(reason.meaning)}"
        for reason in sorted(Reason)
    ]
    lines += ["", "## Of the gateway and the endpoint picker", ""]
    lines += [
        f"- `{reason}` ({reason.http_status}): {plain(reason.meaning)}"
        for reason in sorted(GatewayReason)
    ]
    lines.append("")
    rows = [
        (
            kind.value.replace("_", " "),
            cell(judged.about),
            FailureReason.Name(judged.reported).removeprefix("FAILURE_REASON_"),
            judged.again.value,
            f"{HTTP[judged.reason]} {code(judged.reason)}" if judged.reason else OTHERS[kind],
        )
        for kind, judged in FAILURES.items()
    ]
    lines += [FAILURES_HEAD]
    lines += [*table(("kind", "known by", "reported", "again", "answer"), rows), ""]
    return "\n".join(lines)
