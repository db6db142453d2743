"""The writer of answers, receipts and rows (answer_writer.pyx)."""

from collections.abc import Callable

from router.decide.core.core import RouterCore
from router.decide.core.progress import Pick
from router.decide.decision.decision import Decision

class AnswerWriter:
    """Writes answers to picks of one RouterCore, and the records of its decisions."""

    prefill_worker: Callable[[Decision, int], bytes]

    def __init__(self, core: RouterCore, prefill_worker: Callable[[Decision, int], bytes]) -> None:
        """prefill_worker: makes the PrefillWorker message, as bytes, from the decision about a
        pair's prefill and the bootstrap room."""

    def answer(self, pick: Pick, priority: int, omit_receipt: bool) -> bytes:
        """The RouteResponse of a pick, as bytes, before its load is reserved: its receipts show
        workers as they were. priority: of the request, higher is sooner."""

    def receipt(self, decision: Decision) -> bytes:
        """The Receipt of a decision, with or without a pick, as bytes."""

    def row(self, decision: Decision, row: int) -> bytes:
        """The CandidateRow of the candidate number `row` of a decision, as bytes."""
