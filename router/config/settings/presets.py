"""Sets of settings with names (routing.preset), each chosen on traces that are named with it.

A preset sets keys of `routing` below those of the operator: a key in the file, the environment or a
flag wins over the preset's, key by key (router/config/reading.py lays the two over one another).
`models` and the requests' own policies lie above both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal["balanced", "agents", "chat", "batch", "lowest-latency"]


@dataclass(frozen=True, slots=True)
class Preset:
    """An entry of the table of presets."""

    summary: str
    """Which traffic it is for."""
    sets: Mapping[str, Any]
    """Keys of `routing` with their values; sections are mappings. Only keys that a reload changes
    (router/config/reload.py)."""
    chosen_on: str
    """Traces and numbers that decided, those of `balanced` beside them. Eight engines of 16,384
    blocks unless it says otherwise, whole traces, seed 0 (simulator/RESULTS.md has the fleet)."""


_TTFT_UNGUARDED: Mapping[str, Any] = {
    "policy": "ttft",
    "guard": {"policies": ["dynamo-adaptive"]},
}
"""The guard stays over the default policy, for requests and models that name it."""

PRESETS: dict[PresetName, Preset] = {
    "balanced": Preset(
        summary="any traffic, above all traffic that is not known: the defaults",
        sets={},
        chosen_on="tests/bar: traffic on which a default could lose. The other presets are for"
        " traffic that is known, and lose to this one on some",
    ),
    "agents": Preset(
        summary="sessions of long prompts that grow turn by turn: least mean time to first token",
        sets=_TTFT_UNGUARDED,
        chosen_on="agentic trace. Mean time to first token, balanced in brackets: 189 ms (412) at"
        " 1x, 1,339 (1,607) at 3x, 3,799 (3,918) at 6x, where prompts no longer fit the caches."
        " ttft under the guard has 238, 1,317 and 3,540 ms, and dynamo-unguarded 398, 1,735 and"
        " 3,948",
    ),
    "chat": Preset(
        summary="conversations with people: least mean time to first token and between tokens",
        sets=_TTFT_UNGUARDED,
        chosen_on="conversation trace. Mean times to first token and between tokens, balanced in"
        " brackets: 217 ms (228) and 11.3 ms (12.5) at 3x, 289 (357) and 41.7 (59.8) at 6x. Under"
        " the guard ttft has 217 and 12.1, 303 and 59.3. The same settings as agents came out",
    ),
    "batch": Preset(
        summary="work without a waiting caller: prompt and output tokens a second",
        sets=_TTFT_UNGUARDED,
        chosen_on="conversation and agentic traces. Thousands of tokens a second, balanced in"
        " brackets: 284 (285) on the conversation trace at 8x, 215 (210) on the agentic one at 3x,"
        " 227 (233) at 6x: full engines leave little to choose. Requests end sooner than with"
        " balanced in all three. The same settings as agents came out",
    ),
    "lowest-latency": Preset(
        summary="requests of which none may wait long: least 99th percentile to the first token",
        sets={"policy": "ttft"},
        chosen_on="all three traces. 99th percentile of the time to first token, balanced in"
        " brackets: conversation 1,700 ms (1,743) at 3x, 2,011 (2,106) at 6x; synthetic 1,260"
        " (1,402) at 6x; agentic 3,114 (4,988) at 1x, 29,793 (32,077) at 6x, but 20,055 (19,035) at"
        " 3x. Without the guard: 1,711, 2,126, 1,261, 2,867, 32,264 and 19,453 ms",
    ),
}


def lines(sets: Mapping[str, Any], prefix: str = "routing") -> Iterator[str]:
    """The keys that a preset sets, a line each: `routing.policy: ttft`."""
    for key, value in sets.items():
        where = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from lines(value, where)
        elif isinstance(value, list):
            yield f"{where}: [{', '.join(map(str, value))}]"
        else:
            yield f"{where}: {str(value).lower() if isinstance(value, bool) else value}"
