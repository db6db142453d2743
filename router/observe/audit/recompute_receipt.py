"""Recomputes a receipt's costs, from the numbers that it shows and the formula that it names.

Formulas are arithmetic: numbers, names, + - * / **, comparisons, `and`, `or`, `not`,
`a if b else c`, min, max, abs. After a semicolon a name is given its own formula: `alpha * x;
alpha = 0.7 if y > 1 else 0.3`. Nothing else is evaluated, so a receipt from anywhere does no harm.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from kvroute.v1 import router_pb2
from router.decide.decision.guard import COMPUTED, INVESTED

TOLERANCE = 1e-9
"""Relative difference up to which costs agree: sums of the same doubles, perhaps in another order.
"""
FORMULA_MAX = 4096
"""Most characters of a formula."""

_BINARY: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type, Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}


class FormulaError(ValueError):
    """A formula can't be computed; the message says why."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The recomputed cost of one row of a receipt."""

    worker_id: str
    dp_rank: int
    shown: float
    """The cost that the receipt shows."""
    cost: float
    terms: Mapping[str, float]
    """Numbers that the formula can use, by name."""

    @property
    def agrees(self) -> bool:
        return isclose(self.shown, self.cost, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    @property
    def mismatch(self) -> str:
        """Sentence about a cost that does not agree."""
        name = f"{self.worker_id}/{self.dp_rank}"
        return f"{name}: cost {self.shown!r} in the receipt, {self.cost!r} by its formula"


@dataclass(frozen=True, slots=True)
class MovedFrom:
    """The worker of the least cost, from which the guard moved the pick
    (router/decide/decision/guard.py).
    """

    row: Recomputed
    requests: float
    """Requests ahead of the request at this worker."""
    wait_tokens: float
    picked_wait_tokens: float
    more_overlap_tokens: float
    """Tokens of the prompt that this worker holds more than the pick."""

    @property
    def sentence(self) -> str:
        return (
            f"guarded: {self.row.worker_id}/{self.row.dp_rank} would have been cheapest by cost;"
            f" {self.requests:.0f} requests ahead of it make {self.wait_tokens:.0f} tokens to wait"
            f" for, at the pick {self.picked_wait_tokens:.0f}, and it holds"
            f" {self.more_overlap_tokens:.0f} tokens more of the prompt"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recomputed costs of a receipt, and sentences about numbers that do not match."""

    policy: str
    formula: str
    shared: Mapping[str, float]
    """Numbers that all rows share: parameters, and terms such as the mean load."""
    decided_at_s: float
    replica: str
    prompt_tokens: int
    candidates: int
    excluded: Mapping[str, int]
    """Reason of exclusion -> number of workers."""
    tied: int
    terms: Sequence[str]
    """Names of a row's terms, in the order of the table."""
    rows: list[Recomputed]
    """The pick, and the runner-up where there was one."""
    complaints: list[str]
    """Sentences, one for each contradiction; empty: the receipt holds."""
    moved_from: "MovedFrom | None" = None
    """Where the guard moved the pick from; None: the pick is the cheapest."""


def check(receipt: router_pb2.Receipt) -> Verdict:
    """Recomputes the costs of a receipt's rows, and checks that the pick follows from them. Raises
    FormulaError."""
    if not receipt.HasField("picked"):
        raise FormulaError("the receipt has no row of a picked worker")
    shown = [receipt.picked, *([receipt.runner_up] if receipt.HasField("runner_up") else [])]
    rows = [_row(receipt, row) for row in shown]
    complaints = [row.mismatch for row in rows if not row.agrees]
    drawn = "chance" in receipt.picked.terms
    first = receipt.guarded.cheapest if receipt.HasField("guarded") else receipt.picked
    if drawn and not first.terms["chance"] > 0:
        complaints.append("the pick was drawn by chances, and its chance was 0")
    if not drawn and len(rows) > 1 and rows[0].cost > rows[1].cost and not _ties(*rows):
        complaints.append("the runner-up is cheaper than the pick")
    if receipt.HasField("guarded"):
        complaints += _guard_complaints(receipt)
    if receipt.picked.excluded:
        complaints.append(f"the pick is marked as excluded: {receipt.picked.excluded}")
    return Verdict(
        policy=receipt.policy,
        formula=receipt.formula,
        shared={**receipt.parameters, **receipt.terms},
        decided_at_s=receipt.decided_at_s,
        replica=receipt.replica,
        prompt_tokens=receipt.prompt_tokens,
        candidates=receipt.candidates,
        excluded=dict(receipt.excluded),
        tied=receipt.tied,
        terms=sorted(receipt.picked.terms),
        rows=rows,
        complaints=complaints,
        moved_from=_moved_from(receipt) if receipt.HasField("guarded") else None,
    )


def evaluate(formula: str, numbers: Mapping[str, float]) -> float:
    """Value of a formula. Names that the formula defines win over the given numbers. Raises
    FormulaError."""
    if len(formula) > FORMULA_MAX:
        raise FormulaError(f"the formula has more than {FORMULA_MAX} characters")
    expression, *clauses = [part.strip() for part in formula.split(";")]
    known = dict(numbers)
    try:
        for clause in reversed(clauses):  # what is defined last may be used by what comes before
            name, separator, value = clause.partition(" = ")
            if not separator or not name.isidentifier():
                raise FormulaError(f"the clause {clause!r} of the formula defines no name")
            known[name] = _value(_parsed(value), known)
        return _value(_parsed(expression), known)
    except (RecursionError, OverflowError) as error:  # nested too deep, or a constant too large
        raise FormulaError(f"the formula can't be computed: {error}") from error


def _row(receipt: router_pb2.Receipt, row: router_pb2.CandidateRow) -> Recomputed:
    numbers = {
        **row.numbers,  # an operator's own may have any name
        "prompt_tokens": float(receipt.prompt_tokens),
        "block_size": float(receipt.block_size),
        "new_tokens": row.new_tokens,
        "active_blocks": row.active_blocks,
        **receipt.parameters,
        **receipt.terms,
        **row.terms,
    }
    cost = evaluate(receipt.formula, numbers)
    return Recomputed(row.worker_id, row.dp_rank, row.cost, cost, numbers)


def _moved_from(receipt: router_pb2.Receipt) -> MovedFrom:
    guarded = receipt.guarded
    return MovedFrom(
        _row(receipt, guarded.cheapest),
        guarded.cheapest_requests,
        guarded.cheapest_wait_tokens,
        guarded.picked_wait_tokens,
        receipt.picked.new_tokens - guarded.cheapest.new_tokens,
    )


def _guard_complaints(receipt: router_pb2.Receipt) -> list[str]:
    """Contradictions in a pick that the guard moved, by the formula of
    router/decide/decision/guard.py."""
    guarded, complaints = receipt.guarded, []
    seen = (
        ("cheapest", guarded.cheapest, guarded.cheapest_requests, guarded.cheapest_wait_tokens),
        ("pick", receipt.picked, guarded.picked_requests, guarded.picked_wait_tokens),
    )
    for name, row, requests, wait in seen:
        ahead = row.prefill_tokens_active + guarded.request_tokens * requests
        invested_tokens = row.terms.get("invested_share", 0.0) * receipt.prompt_tokens
        by_formula = ahead + COMPUTED * row.new_tokens - INVESTED * invested_tokens
        if not isclose(wait, by_formula, rel_tol=TOLERANCE):
            complaints.append(
                f"the wait of the {name} is {wait!r} tokens in the receipt, and {by_formula!r} by"
                " the formula"
            )
    cheapest = _row(receipt, guarded.cheapest)
    if not cheapest.agrees:
        complaints.append(cheapest.mismatch)
    drawn = "chance" in guarded.cheapest.terms
    if not drawn and cheapest.shown > receipt.picked.cost:
        complaints.append("the guard moved the pick from a worker that was not cheaper")
    most = guarded.least_wait_tokens + guarded.margin_tokens
    if not (
        guarded.cheapest_wait_tokens > most and guarded.cheapest_requests > guarded.least_requests
    ):
        complaints.append("the guard had no reason to move the pick: the cheapest is in its bounds")
    if guarded.picked_wait_tokens > most and guarded.picked_requests > guarded.least_requests:
        complaints.append("the guard would not have left the pick there: it is over its bounds")
    return complaints


def _ties(row: Recomputed, other: Recomputed) -> bool:
    return isclose(row.cost, other.cost, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise FormulaError(f"the cost's formula can't be read at {text!r}") from error


def _value(node: ast.expr, known: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name):
            if name not in known:
                raise FormulaError(f"the formula uses {name}, which the receipt lacks")
            return known[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                result = _BINARY[type(op)](_value(left, known), _value(right, known))
            except ArithmeticError as error:
                raise FormulaError(
                    f"the formula's {ast.unparse(node)} can't be computed: {error}"
                ) from error
            if isinstance(result, complex):
                raise FormulaError(f"the formula's {ast.unparse(node)} is a complex number")
            return result
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, known)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return float(not _value(operand, known))
        case ast.BoolOp(op=ast.And(), values=parts):
            return float(all(_value(part, known) for part in parts))
        case ast.BoolOp(values=parts):
            return float(any(_value(part, known) for part in parts))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return float(_COMPARE[type(op)](_value(left, known), _value(right, known)))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, known) else orelse, known)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS:
            values = [_value(argument, known) for argument in arguments]
            if len(values) < (1 if name == "abs" else 2):
                raise FormulaError(f"{name} in the formula has too few arguments")
            return float(_CALLS[name](*values))
        case _:
            raise FormulaError(f"{ast.unparse(node)!r} in the formula is not arithmetic")
