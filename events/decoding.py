"""The table of engines whose events kvroute can read: adding one is one file, one entry, one test.

Law: a decoder answers any bytes with an EngineBatch, and never raises (events/engine_wire.py).
"""

from collections.abc import Callable

from events import sglang_events, vllm_events
from events.engine_events import EngineBatch

Decoder = Callable[[bytes], EngineBatch]
"""From one ZMQ payload to what it says."""

DECODERS: dict[str, Decoder] = {
    "sglang": sglang_events.decode,
    "vllm": vllm_events.decode,
}
