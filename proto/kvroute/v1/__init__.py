"""The contract as one import: `from kvroute.v1 import RouteRequest, RouterStub`.

Messages, enums, stubs and servicers of router.proto, fleet.proto and prompts.proto; the generated modules beside
this file stay importable under their own names. Enum values live on their enum:
`Phase.PHASE_PREFILL`. An import of a name as itself exports it, to type checkers, too.
"""

from typing import TYPE_CHECKING

from kvroute.v1.fleet_pb2 import (
    DrainWorkerRequest as DrainWorkerRequest,
    DrainWorkerResponse as DrainWorkerResponse,
    Ejection as Ejection,
    FindDecisionsRequest as FindDecisionsRequest,
    FindDecisionsResponse as FindDecisionsResponse,
    GetIndexStatsRequest as GetIndexStatsRequest,
    GetIndexStatsResponse as GetIndexStatsResponse,
    ListQueueRequest as ListQueueRequest,
    ListQueueResponse as ListQueueResponse,
    ListWorkersRequest as ListWorkersRequest,
    ListWorkersResponse as ListWorkersResponse,
    Observed as Observed,
    PastDecision as PastDecision,
    QueuedBand as QueuedBand,
    QueuedRequest as QueuedRequest,
    QueuedTenant as QueuedTenant,
    RegisterWorkerRequest as RegisterWorkerRequest,
    RegisterWorkerResponse as RegisterWorkerResponse,
    RemoveWorkerRequest as RemoveWorkerRequest,
    RemoveWorkerResponse as RemoveWorkerResponse,
    ResyncWorkerRequest as ResyncWorkerRequest,
    ResyncWorkerResponse as ResyncWorkerResponse,
    WatchDecisionsRequest as WatchDecisionsRequest,
    WatchDecisionsResponse as WatchDecisionsResponse,
    WatchedDecision as WatchedDecision,
    WatchWorkersRequest as WatchWorkersRequest,
    WatchWorkersResponse as WatchWorkersResponse,
    WorkerRef as WorkerRef,
    WorkerStatus as WorkerStatus,
)
from kvroute.v1.fleet_pb2_grpc import (
    FleetServicer as FleetServicer,
    FleetStub as FleetStub,
    add_FleetServicer_to_server as add_FleetServicer_to_server,
)
from kvroute.v1.prompts_pb2 import (
    ListTokenizersRequest as ListTokenizersRequest,
    ListTokenizersResponse as ListTokenizersResponse,
    RenderRequest as RenderRequest,
    RenderResponse as RenderResponse,
    ShapeTrust as ShapeTrust,
    Tokenizer as Tokenizer,
)
from kvroute.v1.prompts_pb2_grpc import (
    add_PromptsServicer_to_server as add_PromptsServicer_to_server,
    PromptsServicer as PromptsServicer,
    PromptsStub as PromptsStub,
)
from kvroute.v1.router_pb2 import (
    Alternative as Alternative,
    BlockHashes as BlockHashes,
    CandidateRow as CandidateRow,
    Explanation as Explanation,
    FailureReason as FailureReason,
    Guarded as Guarded,
    MultimodalItem as MultimodalItem,
    OverlapTokens as OverlapTokens,
    Phase as Phase,
    PrefillWorker as PrefillWorker,
    Progress as Progress,
    ProgressOutcome as ProgressOutcome,
    ProgressResult as ProgressResult,
    ProgressState as ProgressState,
    PromptSource as PromptSource,
    PromptTokens as PromptTokens,
    QueueProgress as QueueProgress,
    Receipt as Receipt,
    ReportRequest as ReportRequest,
    ReportResponse as ReportResponse,
    RouteBatch as RouteBatch,
    RouteItem as RouteItem,
    RouteRequest as RouteRequest,
    RouteResponse as RouteResponse,
    RouteResult as RouteResult,
    RouteResults as RouteResults,
    TokenIds as TokenIds,
)
from kvroute.v1.router_pb2_grpc import (
    RouterServicer as RouterServicer,
    RouterStub as RouterStub,
    add_RouterServicer_to_server as add_RouterServicer_to_server,
)

if TYPE_CHECKING:
    from kvroute.v1.fleet_pb2_grpc import FleetAsyncStub as FleetAsyncStub
    from kvroute.v1.prompts_pb2_grpc import PromptsAsyncStub as PromptsAsyncStub
    from kvroute.v1.router_pb2_grpc import RouterAsyncStub as RouterAsyncStub
else:
    # The generated stubs know these names only as types: at run time one class serves both kinds of
    # channel.
    FleetAsyncStub = FleetStub
    PromptsAsyncStub = PromptsStub
    RouterAsyncStub = RouterStub
