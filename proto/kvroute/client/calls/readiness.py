"""The wait for a router that is ready."""

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kvroute.client.connections.transport import Transport, duration
from kvroute.client.errors import DeadlineExceeded, Unavailable

POLL_S = 0.1
POLL_S_MAX = 1.0


async def wait_ready(transport: Transport, timeout_s: float) -> None:
    """Waits until a router says that it is ready (health "readiness").

    Raises DeadlineExceeded with the last answer, and at once any error but Unavailable.
    """
    left_s = duration("timeout_s", timeout_s)
    deadline_s = transport.clock() + left_s
    poll_s = POLL_S
    seen = "nothing"
    while left_s > 0:
        try:
            message = HealthCheckRequest(service="readiness")
            response = await transport.command(lambda line: line.health, message, left_s)
        except Unavailable as error:
            seen = str(error)
        else:
            if response.status == HealthCheckResponse.SERVING:
                return
            seen = HealthCheckResponse.ServingStatus.Name(response.status)
        await transport.options.sleep(min(poll_s, max(0.0, deadline_s - transport.clock())))
        poll_s = min(POLL_S_MAX, poll_s * 2)
        left_s = deadline_s - transport.clock()
    seen_last = f"not ready after {timeout_s:g} s; the last answer: {seen}"
    raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, seen_last)
