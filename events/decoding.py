"""The table of engines whose events kvroute can read: adding one is one file, one entry, one test.

Law: a decoder answers any bytes with an EngineBatch, and never raises (events/engine_wire.py).
"""

from collections.abc import Callable
from typing import Any

from events import sglang_events, vllm_events
from events.engine_events import EngineBatch
from events.engine_wire import Schema

Decoder = Callable[[bytes], EngineBatch]
"""From one ZMQ payload to what it says."""

DECODERS: dict[str, Decoder] = {
    "sglang": sglang_events.decode,
    "vllm": vllm_events.decode,
}

SCHEMAS: dict[str, Schema[Any]] = {
    "sglang": sglang_events.SCHEMA,
    "vllm": vllm_events.SCHEMA,
}
"""The same engines, for events/batch_reader.py."""
