"""Named sets of routing settings (routing.preset), each with the traces that it was chosen on.

A preset sets keys of `routing` below those of the operator: a key in the file, the environment or a
flag wins over the preset's, key by key (router/config/reading.py lays the two over one another).
`models` and the requests' own policies lie above both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal["balanced", "chat", "batch"]


@dataclass(frozen=True, slots=True)
class Preset:
    """An entry of the table of presets."""

    summary: str
    """The traffic that the preset is for."""
    sets: Mapping[str, Any]
    """Keys of `routing` with their values; sections are mappings. Only keys that a reload changes
    (router/config/reload.py)."""
    chosen_on: str
    """Traces and simulated results that decided, beside those of `balanced`: eight engines of
    16,384 blocks, whole traces, seed 0, 3x for three times a trace's speed (simulator/RESULTS.md).
    """


_TTFT_UNGUARDED: Mapping[str, Any] = {
    "policy": "ttft",
    "guard": {"policies": ["dynamo-adaptive"]},
}
"""Keys that set policy `ttft`, without the guard, which stays on for requests and models that name
the default policy."""

PRESETS: dict[PresetName, Preset] = {
    "balanced": Preset(
        summary="any traffic, above all traffic that is not known: the defaults",
        sets={},
        chosen_on="tests/bar: traffic on which a default could lose. The other presets are for"
        " traffic that is known, and lose to this one on some",
    ),
    "chat": Preset(
        summary="conversations with people: least mean time to first token and between tokens",
        sets=_TTFT_UNGUARDED,
        chosen_on="conversation trace. Mean times to first token and between tokens, balanced in"
        " brackets: 217 ms (217) and 11.2 ms (12.6) at 3x, 289 (302) and 41.5 (60.0) at 6x. Under"
        " the guard ttft has 217 and 12.0, 303 and 58.9",
    ),
    "batch": Preset(
        summary="work without a waiting caller: requests end soonest on full engines",
        sets=_TTFT_UNGUARDED,
        chosen_on="conversation and synthetic traces at 6x. Mean seconds to the end of a request,"
        " balanced in brackets: 14.5 (20.7) and 2.5 (3.7). Full engines leave little to choose in"
        " tokens a second. The same settings as chat came out",
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
