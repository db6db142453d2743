"""The table of engines whose events kvroute reads: a new engine is a file, an entry and a test.

Law: a decoder returns an EngineBatch for any bytes, and never raises (events/engines/wire.py).
"""

from collections.abc import Callable

from events.engines import sglang as sglang_events
from events.engines import vllm as vllm_events
from events.engines.events import EngineBatch

Decoder = Callable[[bytes], EngineBatch]
"""A ZMQ payload -> its events."""

DECODERS: dict[str, Decoder] = {
    "sglang": sglang_events.decode,
    "vllm": vllm_events.decode,
}
