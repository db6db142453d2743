"""The table of engines: a new engine is a folder with its record, an entry here, and its tests."""

from typing import Literal

from events.engines.engine import Engine, HandOver, Reading
from events.engines.sglang.engine import SGLANG
from events.engines.trtllm.engine import TRTLLM
from events.engines.vllm.engine import VLLM

EngineName = Literal["vllm", "sglang", "trtllm"]
"""The engines that kvroute's relays read."""
READINGS: dict[str, Reading] = {
    engine.name: engine.reading for engine in (VLLM, SGLANG, TRTLLM) if engine.reading is not None
}
_DYNAMO = Engine(
    name="dynamo",
    title="Dynamo",
    hand_over=HandOver.IN_TURN,
    unpaired_bodies=frozenset({"messages"}),  # not tried
    eagle_shifts_hashes=True,
)
"""An engine behind NVIDIA Dynamo's frontend, whose events come over Dynamo's event plane."""
ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRTLLM, _DYNAMO)}
_UNKNOWN = Engine(name="", title="an unknown engine")


def engine_of(name: str) -> Engine:
    """The record of the engine that a heartbeat names; for a name without a record, which only a
    later release has, a record of defaults."""
    return ENGINES.get(name, _UNKNOWN)
