"""kvroute's picker as the EPP of the Inference Extension's conformance suite.

The picker, its HTTP/2, its discovery and its picks are kvroute's. Added here is what the suite
wants of an EPP for tests alone: the flags of its own EPP, health on a port apart, a header that
names the endpoints among which the pick falls, and one that says in the answer which endpoint
served. The suite's model servers echo requests, so that the pages of an idle vLLM stand in the
place of theirs.
"""

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from events.engines.pages.probe import EngineHttp, EngineSilent
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.app.main import main as kvroute
from router.gateway.picker import messages
from router.gateway.picker.request_stream import RequestStream

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
UNSERVED = "fail: missing destination endpoint served metadata"
MODEL = {"id": "conformance-fake-model", "object": "model", "owned_by": "vllm"}
PAGES = {
    "/v1/models": json.dumps({"object": "list", "data": [MODEL | {"max_model_len": 49152}]}),
    "/metrics": "".join(
        f'vllm:{name}{{engine="0",model_name="{MODEL["id"]}"}} 0\n'
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ),
}

_subset_of = messages.subset_of
_answered = RequestStream._response_headers
_page = EngineHttp.page


def subset_of(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints of the suite's header; without it, those of the gateway."""
    named = messages.headers_of(message.request_headers).get(SELECTION, "")
    return frozenset(each.strip() for each in named.split(",")) if named else _subset_of(message)


def answered(stream: RequestStream, message: pb.ProcessingRequest) -> None:
    """The answer's headers pass, with one more that names the endpoint which served."""
    said = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    value = (messages.served_of(message) or UNSERVED).encode()
    header = pb.HeaderValue(key=SERVED, raw_value=value)
    said.response_headers.response.header_mutation.set_headers.add(header=header)
    with patch.object(messages, "RESPONSE_HEADERS_PASS", said.SerializeToString()):
        _answered(stream, message)


async def page(engine: EngineHttp, path: str) -> bytes:
    """An idle vLLM's page, of an engine that takes connections. Raises EngineSilent."""
    try:
        await _page(engine, path)
    except EngineSilent as error:
        if error.refused:
            raise
    if (text := PAGES.get(path)) is None:
        raise EngineSilent(f"{path}: status 404", status=404)
    return text.encode()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


async def _health(port: int, picker: int) -> None:
    """The picker's own port, which answers the health check, on one more."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", picker)
        both = _pass_on(reader, there[1]), _pass_on(there[0], writer)
        await asyncio.gather(*both, return_exceptions=True)

    async with await asyncio.start_server(joined, "0.0.0.0", port) as server:
        await server.serve_forever()


def main(arguments: Sequence[str], folder: Path = Path("/opt/conformance")) -> None:
    """Runs the router and its picker until SIGTERM. folder: of tls.crt and tls.key."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool-name")
    parser.add_argument("--pool-namespace")
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--grpc-health-port", type=int)
    flags, _ = parser.parse_known_args(arguments)
    pool = {"enabled": True, "namespace": flags.pool_namespace, "pool": flags.pool_name}
    no_events = {"events_port": None, "replay_port": None}
    certificate = {"certificate_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key"}
    config = {
        "grpc": {"listen": "127.0.0.1:50051"},
        "tls": certificate,
        "picker": {"listen": f"0.0.0.0:{flags.grpc_port}"},
        "discovery": {"kubernetes": pool | no_events},
    }
    file = Path("/tmp/kvroute.yaml")
    file.write_text(json.dumps(config), encoding="utf-8")
    messages.subset_of = subset_of
    RequestStream._response_headers = answered  # type: ignore[method-assign]
    EngineHttp.page = page  # type: ignore[method-assign]
    health = _health(flags.grpc_health_port, flags.grpc_port)
    threading.Thread(target=asyncio.run, args=(health,), daemon=True).start()
    sys.argv = ["kvroute", "serve", "--config", str(file)]
    kvroute()


if __name__ == "__main__":
    main(sys.argv[1:])
