"""NATS subjects: kvroute.v1.<fleet>.<plane>[.<worker>.<rank>], ids percent-encoded."""

import re
from functools import lru_cache
from typing import Literal, NamedTuple
from urllib.parse import unquote

from indexer.identity import WorkerKey

_PREFIX = "kvroute.v1"

Side = Literal["relay", "router"]


class Plane(NamedTuple):
    """One kind of messages: whose id ends its subjects, which side publishes, which subscribe."""

    name: str
    whose: Literal["worker", "replica", "fleet"]
    publisher: Side
    subscribers: tuple[Side, ...]
    trespass: str = ""
    """What a relay could do that had a router's or another relay's rights here; empty: no harm."""


PLANES = (
    Plane("facts", "worker", "relay", ("router",), "publish facts of other workers"),
    Plane("load", "worker", "relay", ("router",), "publish the load of other workers"),
    Plane("snapshot", "worker", "router", ("relay",), "answer snapshot requests of others"),
    Plane("warm", "worker", "router", ("relay",), "read prompts that others are to warm"),
    Plane("hello", "fleet", "router", ("relay", "router")),
    Plane("control", "fleet", "router", ("router",), "drain and remove workers"),
    Plane("inflight", "replica", "router", ("router",)),
    Plane("report", "replica", "router", ("router",)),
)
"""All kinds of messages; events/plane/permissions.py makes NATS permissions of this table."""
_RANK_DIGITS_MAX = 5
_ID_CHARACTERS_MAX = 256
_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")


def escape(worker_id: str) -> str:
    """A worker id as one subject token: bytes of UTF-8 outside [A-Za-z0-9_-] percent-encoded."""
    return _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], worker_id.encode()).decode()


def facts(fleet: str, worker: WorkerKey) -> str:
    return _of_worker(fleet, "facts", worker)


def load(fleet: str, worker: WorkerKey) -> str:
    return _of_worker(fleet, "load", worker)


def snapshot(fleet: str, worker: WorkerKey) -> str:
    return _of_worker(fleet, "snapshot", worker)


def warm(fleet: str, worker: WorkerKey) -> str:
    return _of_worker(fleet, "warm", worker)


def all_of(fleet: str, plane: str) -> str:
    """The wildcard subject of one plane of all workers, to which routers subscribe."""
    return f"{_PREFIX}.{fleet}.{plane}.*.*"


def of_publisher(fleet: str, plane: str, token: bytes) -> str:
    """The wildcard subject of one plane of all ranks of a worker. token: its escaped id."""
    return f"{_PREFIX}.{fleet}.{plane}.{token.decode('ascii')}.*"


def inflight(fleet: str, replica: str) -> str:
    return f"{_PREFIX}.{fleet}.inflight.{escape(replica)}"


def every_inflight(fleet: str) -> str:
    return f"{_PREFIX}.{fleet}.inflight.*"


def report(fleet: str, replica: str) -> str:
    return f"{_PREFIX}.{fleet}.report.{escape(replica)}"


def hello(fleet: str) -> str:
    return f"{_PREFIX}.{fleet}.hello"


def control(fleet: str) -> str:
    return f"{_PREFIX}.{fleet}.control"


@lru_cache(maxsize=8192)
def worker_of(subject: str) -> WorkerKey | None:
    """The worker that a NATS subject names; None: it names none, or not in an id's one spelling."""
    tokens = subject.split(".")
    if len(tokens) != 6 or not tokens[5].isascii() or not tokens[5].isdigit():
        return None
    if len(tokens[5]) > _RANK_DIGITS_MAX:  # no engine has as many ranks, and int() has its limits
        return None
    try:
        worker_id = unquote(tokens[4], errors="strict")
    except UnicodeDecodeError:
        return None
    rank = int(tokens[5])
    # An id has a single spelling, or two subjects could stand for the same worker.
    if not worker_id or escape(worker_id) != tokens[4] or str(rank) != tokens[5]:
        return None
    if len(worker_id) > _ID_CHARACTERS_MAX or not worker_id.isprintable():
        return None  # ids reach headers, logs and terminals
    return WorkerKey(worker_id, rank)


def worker_token(subject: bytes) -> bytes:
    """A NATS subject's token in the place of the worker id, unchecked; empty: too few tokens."""
    tokens = subject.split(b".", 5)
    return tokens[4] if len(tokens) > 4 else b""


@lru_cache(maxsize=8192)
def worker_id_of(token: bytes) -> str | None:
    """The worker id that a subject's token encodes; None: the token encodes no valid id."""
    worker = worker_of(f"{_PREFIX}._._.{token.decode(errors='replace')}.0")
    return None if worker is None else worker.worker_id


def _of_worker(fleet: str, plane: str, worker: WorkerKey) -> str:
    return f"{_PREFIX}.{fleet}.{plane}.{escape(worker.worker_id)}.{worker.dp_rank}"
