"""A fleet that has all switched on that has a metric of its own: two routers, gateway, picker,
discovery of pods, a tokenizer, spans, a shadow policy, hot prefixes, the decision log."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

from kvroute.v1 import Progress, ProgressState
from tests.scraped.engines import MODEL
from tests.scraped.prometheus import Prometheus
from tests.scraped.stage import EPP, TOKENS, Fleet, Setup, a_fleet
from tests.stage.kubernetes import KubernetesServer, kubernetes_server, pod

EVERY_S = 0.5
SELECTOR = "app=vllm"


class Collector(service_grpc.TraceServiceServicer):
    """Takes spans, and keeps none."""

    async def Export(self, request: Any, context: Any) -> Any:
        return service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def a_collector() -> AsyncIterator[str]:
    """Its URL."""
    server = grpc.aio.server()
    service_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def everything(
    name: str, tls: str, folder: Path, prometheus: Prometheus
) -> AsyncIterator[Fleet]:
    """tls: config.metrics.tls."""
    async with AsyncExitStack() as stack:
        kubernetes = await stack.enter_async_context(kubernetes_server())
        collector = await stack.enter_async_context(a_collector())
        config = {
            "metrics": {"tls": tls},
            "gateway": {"forward": "tokens"},
            **EPP,
            "tracing": {"endpoint": collector, "share": 1},
            "decision_log": {"file": f"{folder}/{name}/decisions", "share": 1},
            "routing": {
                "shadow_policy": "ttft",
                "shadow_share": 1,
                "hot_prefixes": {"enabled": True},
            },
            "models": [{"name": MODEL, "prompts": {"folder": TOKENS}}],
            "discovery": {
                "kubernetes": {"enabled": True, "selector": SELECTOR, "namespace": "inference"}
                | {"api": kubernetes.url},
            },
        }
        halves = tuple({"role": role} for role in ("both", "prefill", "decode"))
        setup = Setup(config, routers=2, engines=4, pods=1, workers=halves, gateway=True)
        fleet = await stack.enter_async_context(
            a_fleet(name, setup, folder, prometheus, found=lambda one: add_pod(kubernetes, one))
        )
        yield fleet


def add_pod(kubernetes: KubernetesServer, worker: dict[str, Any]) -> None:
    """An engine that discovery finds."""
    ports = {"port": worker["address"], "events-port": worker["events"]}
    ports["replay-port"] = worker["replay"]
    own = {f"kvroute.io/{key}": value.rpartition(":")[2] for key, value in ports.items()}
    own |= {"kvroute.io/topic": worker["topic"], "kvroute.io/slots": str(worker["slots"])}
    kubernetes.put(pod("engine-of-a-pod", annotations=own))


async def use_everything(fleet: Fleet) -> None:
    """Traffic of each kind; never returns."""
    prompts = [fleet.prompt(512) for _ in range(8)]
    async with fleet.client_of(1) as replica:

        async def use() -> None:
            prompt = random.choice(prompts) + fleet.prompt(32)
            session = f"session-{random.randrange(20)}"
            await fleet.complete(prompt, user=session)
            await fleet.chat(prompt)
            await fleet.chat(prompt, inside=True, stream=True)
            # A body that no router can read goes by load: the engine judges it.
            await fleet.chat("", messages=7)
            await fleet.pick(prompt)
            # Another router than the one that picked gets the report, and hands it on.
            known = await fleet.client.route(text=prompt, model=MODEL, session_id=session)
            done = ProgressState.PROGRESS_STATE_FINISHED
            await replica.report(Progress(reservation_id=known.reservation_id, state=done))

        await fleet.ask_for_it(EVERY_S, use)
