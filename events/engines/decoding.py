"""The table of engines whose events kvroute reads: a new engine is a file, an entry and a test.

Law: a decoder returns an EngineBatch for any bytes, and never raises (events/engines/wire.py).
"""

from collections.abc import Callable
from typing import Any

from events.engines import sglang as sglang_events
from events.engines import vllm as vllm_events
from events.engines.events import EngineBatch
from events.engines.wire import Schema

Decoder = Callable[[bytes], EngineBatch]
"""A ZMQ payload -> its events."""

DECODERS: dict[str, Decoder] = {
    "sglang": sglang_events.decode,
    "vllm": vllm_events.decode,
}

SCHEMAS: dict[str, Schema[Any]] = {
    "sglang": sglang_events.SCHEMA,
    "vllm": vllm_events.SCHEMA,
}
"""The same engines, for events/engines/batch_reader.py."""
