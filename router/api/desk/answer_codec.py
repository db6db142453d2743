"""Writes answers to clients: picks, receipts, explanations, results of reported steps."""

import struct
from collections.abc import Collection, Iterator

from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from indexer.identity import WorkerKey
from kvroute.client.messages.wire import head
from kvroute.v1 import router_pb2
from router.api.desk.answer_writer import AnswerWriter
from router.api.desk.statuses import write_status
from router.decide.core.core import RouterCore
from router.decide.core.progress import ProgressResult
from router.decide.decision.decision import Decision
from router.decide.decision.handover import bootstrap_server, transfer_params
from router.fleet.pools import heartbeat_of
from router.request.refusal import Refusal

ROWS_MAX = 16
"""Candidates of an Explanation that are written at once, at most."""
_DOUBLE = struct.Struct("<d")
_QUEUE_MS = bytes([router_pb2.RouteResponse.QUEUE_MS_FIELD_NUMBER << 3 | 1])
"""Tag of RouteResponse.queue_ms, a double, in protobuf's wire format."""
_CANDIDATES = router_pb2.Explanation.CANDIDATES_FIELD_NUMBER
_RECEIPT = router_pb2.Explanation.RECEIPT_FIELD_NUMBER
_PREFILL_CANDIDATES = router_pb2.Explanation.PREFILL_CANDIDATES_FIELD_NUMBER
_PREFILL_RECEIPT = router_pb2.Explanation.PREFILL_RECEIPT_FIELD_NUMBER
RESULTS = {
    ProgressResult.APPLIED: router_pb2.PROGRESS_RESULT_APPLIED,
    ProgressResult.UNCHANGED: router_pb2.PROGRESS_RESULT_UNCHANGED,
    ProgressResult.UNKNOWN: router_pb2.PROGRESS_RESULT_UNKNOWN,
}


def with_queue_time(answer: bytes, waited_s: float, ahead: int) -> bytes:
    """Adds to a RouteResponse, as bytes, the seconds that its request waited, as queue_ms, and the
    number of requests that were ahead of it.

    The two fields are appended: protobuf reads fields in any order.
    """
    place = router_pb2.RouteResponse(queue_ahead=ahead).SerializeToString()
    return answer + _QUEUE_MS + _DOUBLE.pack(waited_s * 1000) + place


def answer_writer(core: RouterCore) -> AnswerWriter:
    """Makes the writer of a router's answers and receipts."""
    return AnswerWriter(core, PrefillWorkers(core.fleet.view.sources))


def explanations(
    decision: Decision, refusal: Refusal | None, core: RouterCore, writer: AnswerWriter
) -> Iterator[bytes]:
    """Describes every candidate of a decision that reserved nothing. refusal: the refusal that a
    request would get; None: it would get a worker. The yielded parts, joined, are one Explanation.

    A part has ROWS_MAX candidates at most, so that other tasks run between two of them.
    """
    yield framed(_RECEIPT, writer.receipt(decision))
    yield from _rows(_CANDIDATES, decision, writer)
    if decision.prefill is not None:
        yield framed(_PREFILL_RECEIPT, writer.receipt(decision.prefill))
        yield from _rows(_PREFILL_CANDIDATES, decision.prefill, writer)
    explanation = router_pb2.Explanation()
    for source, reason in decision.not_live:
        if len(explanation.candidates) >= ROWS_MAX:
            yield explanation.SerializeToString()
            explanation.Clear()
        explanation.candidates.add(
            worker_id=source.key.worker_id,
            dp_rank=source.key.dp_rank,
            stream_state=source.stream.state,
            stream_complete=core.fleet.view.complete(source),
            excluded=reason,
        )
    if refusal is not None:
        explanation.refusal.CopyFrom(write_status(refusal))
    else:
        source = decision.sources[decision.order[0]]
        explanation.worker_id = source.key.worker_id
        if heartbeat_of(source).multi_rank:
            explanation.dp_rank = source.key.dp_rank
        if decision.computing is not decision:
            explanation.prefill_worker.MergeFromString(writer.prefill_worker(decision.computing, 0))
    yield explanation.SerializeToString()


def _rows(number: int, decision: Decision, writer: AnswerWriter) -> Iterator[bytes]:
    """Yields all candidates as fields with the field number `number`, in parts of ROWS_MAX rows: by
    rising cost, excluded candidates last."""
    costs = decision.ranking.costs
    rows = sorted(
        range(len(decision.pool)), key=lambda row: (decision.excluded[row] != "", costs[row])
    )
    for first in range(0, len(rows), ROWS_MAX):
        part = rows[first : first + ROWS_MAX]
        yield b"".join(framed(number, writer.row(decision, row)) for row in part)


class PrefillWorkers:
    """Writes PrefillWorker messages, which pairs have in their answers. The fields that a worker's
    heartbeat determines are written once for each heartbeat.
    """

    def __init__(self, workers: Collection[object]) -> None:
        """workers: those of the fleet, whose number bounds how many written fields are kept."""
        self._workers = workers
        self._known: dict[WorkerKey, tuple[Heartbeat, bytes]] = {}

    def __call__(self, decision: Decision, room: int) -> bytes:
        """The PrefillWorker message, as bytes, for a decision about a pair's prefill.

        room: the bootstrap room, by which a pair's workers find each other; 0: the message is only
        shown to people, and no request uses it.
        """
        row = decision.order[0]
        source, overlap = decision.sources[row], decision.overlap(row)
        message = router_pb2.PrefillWorker(
            overlap_tokens=router_pb2.OverlapTokens(**overlap._asdict()),
            new_tokens=decision.request.prompt.token_count - overlap.usable,
        )
        if room:
            prefill, decode = transfer_params(heartbeat_of(source), room)
            message.bootstrap_room = room
            message.prefill_kv_transfer_params = prefill
            message.decode_kv_transfer_params = decode
        return self._worker(source) + message.SerializeToString()

    def _worker(self, source: Source) -> bytes:
        """The fields of a PrefillWorker that the worker's heartbeat determines, as bytes; kept
        until the worker has another heartbeat."""
        heartbeat, key = heartbeat_of(source), source.key
        known = self._known.get(key)
        if known is not None and known[0] is heartbeat:
            return known[1]
        host, port = bootstrap_server(heartbeat)
        message = router_pb2.PrefillWorker(
            worker_id=key.worker_id,
            dp_rank=key.dp_rank if heartbeat.multi_rank else None,
            address=heartbeat.address,
            engine=heartbeat.engine,
            kv_connector=heartbeat.kv_connector,
            kv_engine_id=heartbeat.kv_engine_id,
            labels=heartbeat.labels,
            bootstrap_host=host,
            bootstrap_port=port,
        )
        if len(self._known) > 2 * len(self._workers):
            self._known.clear()  # of workers that are gone
        written = message.SerializeToString()
        self._known[key] = heartbeat, written
        return written


def framed(number: int, message: bytes) -> bytes:
    """A message's bytes as the field `number` of another message, with tag and length."""
    return head(number, len(message)) + message
