"""An asyncio client of kvroute: ask for a worker, tell the router how the request went.

    async with KvRouteClient("router:50051") as client:
        async with client.request(token_ids=ids, model="m") as request:
            ...  # send the request to request.pick.address
            await request.prefill_done()
            request.output_tokens = 512
            request.cached_tokens = cached_tokens(usage, details_enabled=True)

The distribution kvroute-client installs this package, `kvroute`, alone: it needs grpcio, protobuf,
their health and googleapis protos, and none of the router's own packages.

    calls.py           KvRouteClient: every call of the contract, deadlines, retries
    lines.py           the routers: which there are, where a call goes, whose a reservation is
    silence.py         routers that take calls and say nothing
    lane.py            route calls of many tasks, as batches on one open stream to a router
    lane_items.py      what a lane carries
    report_lane.py     reports of many tasks, as few calls to a router
    life.py            RoutedRequest: one request from its reservation to its last report
    attempts.py        the same request on other workers, before its first token
    budget.py          how many requests may be tried again
    fallback.py        picks without a router, among the workers listed last
    bounded_hash.py    consistent hashing with bounded loads
    options.py         the keywords of route(), and the RouteRequest they make
    hashes.py          block hashes in any common form, as packed fixed64
    wire.py            protobuf's wire format around bytes
    prompt_hashing.py  token prompts hashed here, in the size that answers say
    tokens.py          a prompt in any common form, as little-endian u32
    usage.py           reused tokens, out of what an engine answers
    pick.py            what route() answers
    errors.py          what the calls raise
    retry.py           which error is worth another try, and when
    channel.py         targets and gRPC options
"""

from kvroute.client.attempts import Attempt, Attempts
from kvroute.client.budget import RetryBudget, RetryBudgetPolicy
from kvroute.client.calls import KvRouteClient
from kvroute.client.errors import (
    AlreadyExists,
    ClientClosed,
    ClientOverloaded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    KvRouteError,
    NotFound,
    NoWorker,
    Overloaded,
    PermissionDenied,
    RouterUnreachable,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownSession,
    UnknownWorker,
    WorkerExists,
    error_from_status,
)
from kvroute.client.fallback import FallbackPolicy
from kvroute.client.life import RoutedRequest, UnusableAnswer
from kvroute.client.options import RouteOptions, route_request
from kvroute.client.pick import Alternative, OverlapTokens, Pick, PrefillWorker
from kvroute.client.retry import RetryPolicy
from kvroute.client.tokens import pack_tokens
from kvroute.client.usage import cached_tokens

__all__ = [
    "AlreadyExists",
    "Alternative",
    "Attempt",
    "Attempts",
    "ClientClosed",
    "ClientOverloaded",
    "DeadlineExceeded",
    "DuplicateRequest",
    "FallbackPolicy",
    "InvalidRequest",
    "KvRouteClient",
    "KvRouteError",
    "NoWorker",
    "NotFound",
    "OverlapTokens",
    "Overloaded",
    "PermissionDenied",
    "Pick",
    "PrefillWorker",
    "RetryBudget",
    "RetryBudgetPolicy",
    "RetryPolicy",
    "RouteOptions",
    "RoutedRequest",
    "RouterUnreachable",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "UnknownSession",
    "UnknownWorker",
    "UnusableAnswer",
    "WorkerExists",
    "cached_tokens",
    "error_from_status",
    "pack_tokens",
    "route_request",
]
