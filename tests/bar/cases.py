"""Traffic on which a default could lose, in the language of tests/router/story.py.

Each case is a fleet's line and what comes to it. Rates keep engines busy without queues that grow,
but where a case is about that. Engines: 64-token blocks and the story's default prices.
"""

QUESTIONS = "own*:64..512"
LONG = "own*:512..4096"
OUTPUT = "output=50..150"
SYSTEM = f"prompts 400 rate={{rate}} text=sys:{{system}},{{own}} {OUTPUT}"


def _system(workers: int, system: int, rate: float, own: str = QUESTIONS) -> list[str]:
    return [f"fleet workers={workers}", SYSTEM.format(rate=rate, system=system, own=own)]


def _sessions(count: int, workers: int, blocks: int, think: str = "1..3") -> list[str]:
    sessions = f"sessions {count} turns=10 rate={count / 10:g} text=s*:1024 grow=512"
    return [
        f"fleet workers={workers} block_count={blocks}",
        f"{sessions} think={think} {OUTPUT}",
    ]


CASES: dict[str, list[str]] = {
    "system prompt of 4,096, short questions, 8 workers": _system(8, 4096, 40),
    "system prompt of 4,096, long questions, 8 workers": _system(8, 4096, 30, LONG),
    "system prompt of 512, 8 workers": _system(8, 512, 40, "own*:64..2048"),
    "system prompt of 512, 2 workers": _system(2, 512, 8, "own*:64..2048"),
    "system prompt of 4,096, 2 workers": _system(2, 4096, 10),
    "system prompt of 4,096, 64 workers": _system(64, 4096, 320),
    "two applications": [
        "fleet workers=8",
        f"prompts 200 rate=15 text=one:4096,own*:64..1024 {OUTPUT}",
        f"prompts 200 rate=15 text=two:2048,own*:64..1024 {OUTPUT}",
    ],
    "nothing shared": ["fleet workers=8", "prompts 400 rate=20 text=own*:512..8192 output=50..250"],
    "one tenant's prefix hot": [
        "fleet workers=8",
        f"prompts 250 rate=16 text=hot:3072,own*:64..2048 {OUTPUT}",
        *(f"prompts 10 rate=0.7 text=t{i}:3072,own*:64..2048 {OUTPUT}" for i in range(19)),
    ],
    "8 sessions on 4, all fit": _sessions(8, 4, 16_384),
    "24 sessions on 4, all fit": _sessions(24, 4, 16_384),
    "100 sessions on 8, all fit": _sessions(100, 8, 16_384),
    "200 sessions on 8, all fit": _sessions(200, 8, 16_384),
    "100 sessions on 8, half fits": _sessions(100, 8, 700),
    "100 sessions on 8, a tenth fits": _sessions(100, 8, 256),
    "idle fleet": ["fleet workers=8", f"prompts 150 rate=0.5 text=sys:4096,own*:64..2048 {OUTPUT}"],
    "at the limit, nothing shared": [
        "fleet workers=8",
        "prompts 800 rate=36 text=own*:512..8192 output=50..250",
    ],
    "at the limit, two applications": [
        "fleet workers=8",
        f"prompts 500 rate=45 text=one:4096,{LONG} {OUTPUT}",
        f"prompts 500 rate=45 text=two:2048,{LONG} {OUTPUT}",
    ],
}

TUNING = frozenset(list(CASES)[::2])
"""The half by which numbers are chosen; the others are held out."""
