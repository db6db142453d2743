"""The contract as one import: `from kvroute.v1 import RouteRequest, RouterStub`.

Messages, enums, stubs and servicers of router.proto, fleet.proto and prompts.proto; the generated modules beside
this file stay importable under their own names. Enum values live on their enum:
`Phase.PHASE_PREFILL`.
"""

from typing import TYPE_CHECKING

from kvroute.v1.fleet_pb2 import (
    DrainWorkerRequest,
    DrainWorkerResponse,
    Ejection,
    GetIndexStatsRequest,
    GetIndexStatsResponse,
    ListQueueRequest,
    ListQueueResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    QueuedBand,
    QueuedRequest,
    QueuedTenant,
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    RemoveWorkerRequest,
    RemoveWorkerResponse,
    ResyncWorkerRequest,
    ResyncWorkerResponse,
    WatchDecisionsRequest,
    WatchDecisionsResponse,
    WatchedDecision,
    WatchWorkersRequest,
    WatchWorkersResponse,
    WorkerRef,
    WorkerStatus,
)
from kvroute.v1.fleet_pb2_grpc import FleetServicer, FleetStub, add_FleetServicer_to_server
from kvroute.v1.prompts_pb2 import (
    ListTokenizersRequest,
    ListTokenizersResponse,
    RenderRequest,
    RenderResponse,
    ShapeTrust,
    Tokenizer,
)
from kvroute.v1.prompts_pb2_grpc import (
    PromptsServicer,
    PromptsStub,
    add_PromptsServicer_to_server,
)
from kvroute.v1.router_pb2 import (
    Alternative,
    BlockHashes,
    CandidateRow,
    Explanation,
    FailureReason,
    Guarded,
    MultimodalItem,
    OverlapTokens,
    Phase,
    PrefillWorker,
    Progress,
    ProgressOutcome,
    ProgressResult,
    ProgressState,
    PromptSource,
    PromptTokens,
    QueueProgress,
    Receipt,
    ReportRequest,
    ReportResponse,
    RouteBatch,
    RouteItem,
    RouteRequest,
    RouteResponse,
    RouteResult,
    RouteResults,
    TokenIds,
)
from kvroute.v1.router_pb2_grpc import RouterServicer, RouterStub, add_RouterServicer_to_server

if TYPE_CHECKING:
    from kvroute.v1.fleet_pb2_grpc import FleetAsyncStub
    from kvroute.v1.prompts_pb2_grpc import PromptsAsyncStub
    from kvroute.v1.router_pb2_grpc import RouterAsyncStub
else:
    # The generated stubs know these names only as types: at run time one class serves both kinds of
    # channel.
    FleetAsyncStub = FleetStub
    PromptsAsyncStub = PromptsStub
    RouterAsyncStub = RouterStub

__all__ = [
    "Alternative",
    "BlockHashes",
    "CandidateRow",
    "DrainWorkerRequest",
    "DrainWorkerResponse",
    "Ejection",
    "Explanation",
    "FailureReason",
    "FleetAsyncStub",
    "FleetServicer",
    "FleetStub",
    "GetIndexStatsRequest",
    "GetIndexStatsResponse",
    "Guarded",
    "ListQueueRequest",
    "ListQueueResponse",
    "ListTokenizersRequest",
    "ListTokenizersResponse",
    "ListWorkersRequest",
    "ListWorkersResponse",
    "MultimodalItem",
    "OverlapTokens",
    "Phase",
    "PrefillWorker",
    "Progress",
    "ProgressOutcome",
    "ProgressResult",
    "ProgressState",
    "PromptSource",
    "PromptTokens",
    "PromptsAsyncStub",
    "PromptsServicer",
    "PromptsStub",
    "QueueProgress",
    "QueuedBand",
    "QueuedRequest",
    "QueuedTenant",
    "Receipt",
    "RegisterWorkerRequest",
    "RegisterWorkerResponse",
    "RemoveWorkerRequest",
    "RemoveWorkerResponse",
    "RenderRequest",
    "RenderResponse",
    "ReportRequest",
    "ReportResponse",
    "ResyncWorkerRequest",
    "ResyncWorkerResponse",
    "RouteBatch",
    "RouteItem",
    "RouteRequest",
    "RouteResponse",
    "RouteResult",
    "RouteResults",
    "RouterAsyncStub",
    "RouterServicer",
    "RouterStub",
    "ShapeTrust",
    "TokenIds",
    "Tokenizer",
    "WatchDecisionsRequest",
    "WatchDecisionsResponse",
    "WatchedDecision",
    "WatchWorkersRequest",
    "WatchWorkersResponse",
    "WorkerRef",
    "WorkerStatus",
    "add_FleetServicer_to_server",
    "add_PromptsServicer_to_server",
    "add_RouterServicer_to_server",
]
