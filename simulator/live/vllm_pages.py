"""What vLLM 0.32 says of itself over HTTP. Pure."""

from typing import Any

from simulator.live.engine import Engine
from simulator.live.publisher import Publisher
from simulator.live.vllm_metrics import metrics_text

RELEASE = "0.32.0"
"""The release whose messages and endpoints this reproduces."""


def _version(_engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    return {"version": RELEASE}


def _metrics(engine: Engine, _publisher: Publisher | None, _bootstrap: int | None) -> Any:
    return metrics_text(engine)


def _event_sources(_engine: Engine, publisher: Publisher | None, _bootstrap: int | None) -> Any:
    if publisher is None:
        return {}
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "buffer_steps": publisher.ring_batches,
        "topic": publisher.topic,
    }
    return {"0": source}


PAGES = {"/version": _version, "/metrics": _metrics, "/kv_event_sources": _event_sources}
