"""An asyncio client of kvroute: route a request, report its progress.

    async with KvRouteClient("router:50051") as client:
        async with client.chat({"model": "m", "messages": [...]}) as request:
            ...  # POST request.body to request.url, with request.headers
            await request.prefill_done()  # at the first token
            request.read_usage(answer["usage"], details_enabled=True)

The distribution kvroute-client installs this package, `kvroute`, alone: it needs grpcio, protobuf,
their health and googleapis protos, and none of the router's own packages.

A folder may import those below it in this list; `requests` knows no connection.

    calls/        KvRouteClient: every call of the contract
      calls.py          the client itself
      picking.py        Route, over a stream or as a call, else by the fallback
      reporting.py      Report, to the router that made the reservation
      fleet_calls.py    the Fleet service
      queue_calls.py    steps of requests that wait, to every router
      prompt_calls.py   the Prompts service
    requests/     one request, as a caller has it
      requests.py       the client's calls about requests
      life.py           RoutedRequest: from its reservation to its last report
      attempts.py       the same request on other workers, before its first token
      budget.py         the retry budget
      reports.py        last reports, delivered after their requests
    connections/  how a call reaches a router
      transport.py      attempts of a call: the line, retries, the deadline
      lines.py          the connections to routers, and the choice of a line for each call
      line.py           the connection to one router, and its batching
      silence.py        detects routers that take calls and send nothing
      route_stream.py   route calls of many tasks, as batches on one open stream to a router
      route_stream_items.py   the items of that stream
      report_batches.py reports of many tasks, as few calls to a router
      retry.py          which error is worth another attempt, and when
      channel.py        targets and gRPC options
    fallback/     picks without a router
      takeover.py       when the fallback picks in the place of routers
      fallback.py       picks among the workers listed last
      bounded_hash.py   consistent hashing with bounded loads
    messages/     values of the contract
      options.py        the keywords of route(), and their RouteRequest
      pick.py           Pick, the answer of route()
      bodies.py         HTTP bodies as prompts
      tokens.py         token ids and block hashes in any common form, as bytes
      usage.py          counts of tokens, from an engine's answer
      wire.py           protobuf's wire format around bytes
    errors.py     errors of the calls
"""

from kvroute.client.calls.calls import KvRouteClient
from kvroute.client.connections.retry import RetryPolicy
from kvroute.client.errors import (
    AlreadyExists,
    ClientClosed,
    ClientOverloaded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    KvRouteError,
    NotFound,
    NoTokens,
    NoWorker,
    Overloaded,
    PermissionDenied,
    RouterUnreachable,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownSession,
    UnknownWorker,
    UnusableAnswer,
    WorkerExists,
    error_from_status,
)
from kvroute.client.fallback.fallback import FallbackPolicy
from kvroute.client.messages.bodies import Body
from kvroute.client.messages.options import RequestKeywords, RouteOptions, route_request
from kvroute.client.messages.pick import (
    Alternative,
    OverlapTokens,
    Pick,
    PrefillWorker,
    PromptTokens,
)
from kvroute.client.messages.tokens import pack_tokens, unpack_tokens
from kvroute.client.messages.usage import Usage, cached_tokens, read_usage
from kvroute.client.requests.attempts import Attempt, Attempts
from kvroute.client.requests.budget import RetryBudget, RetryBudgetPolicy
from kvroute.client.requests.life import RoutedRequest
from kvroute.client.requests.requests import RequestCalls

__all__ = [
    "AlreadyExists",
    "Alternative",
    "Attempt",
    "Attempts",
    "Body",
    "ClientClosed",
    "ClientOverloaded",
    "DeadlineExceeded",
    "DuplicateRequest",
    "FallbackPolicy",
    "InvalidRequest",
    "KvRouteClient",
    "KvRouteError",
    "NoTokens",
    "NoWorker",
    "NotFound",
    "OverlapTokens",
    "Overloaded",
    "PermissionDenied",
    "Pick",
    "PrefillWorker",
    "PromptTokens",
    "RequestCalls",
    "RequestKeywords",
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
    "Usage",
    "WorkerExists",
    "cached_tokens",
    "error_from_status",
    "pack_tokens",
    "read_usage",
    "route_request",
    "unpack_tokens",
]
