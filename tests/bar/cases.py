"""Traffic on which a default could lose, in the language of tests/stage/story.py.

Each case is a fleet's line and what comes to it. Rates keep engines busy without queues that grow,
but where a case is about that. Prompts with a shared text are so many that the first one of each
worker, which computes that text, is no part of the 99th percentile. Engines: 64-token blocks and
the story's default prices.

At the limit: 95 % of the highest rate (a second, in steps of a tenth) at which the time to first
token of 2,000 requests by `least-loaded` does not grow with their number: 38 where nothing is
shared, 27 with half of the workers half as fast, 70 with two applications.
"""

QUESTIONS = "own*:64..512"
LONG = "own*:512..4096"
HALF_SLOW = "fleet workers=8 slow_workers=4"
OUTPUT = "output=50..150"
SYSTEM = f"prompts {{count}} rate={{rate}} text=sys:{{system}},{{own}} {OUTPUT}"


def _system(workers: int, system: int, rate: float, own: str = QUESTIONS) -> list[str]:
    # Of 400 requests the 99th percentile is the fourth worst. On two workers it differed by 20 %.
    count = 2000 if workers <= 2 else 400 if workers <= 8 else 1200
    return [
        f"fleet workers={workers}",
        SYSTEM.format(count=count, rate=rate, system=system, own=own),
    ]


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
        f"prompts 1000 rate=15 text=one:4096,own*:64..1024 {OUTPUT}",
        f"prompts 1000 rate=15 text=two:2048,own*:64..1024 {OUTPUT}",
    ],
    "nothing shared": ["fleet workers=8", "prompts 400 rate=20 text=own*:512..8192 output=50..250"],
    "one tenant's prefix hot": [
        "fleet workers=8",
        f"prompts 1250 rate=16 text=hot:3072,own*:64..2048 {OUTPUT}",
        *(f"prompts 50 rate=0.7 text=t{i}:3072,own*:64..2048 {OUTPUT}" for i in range(19)),
    ],
    "8 sessions on 4, all fit": _sessions(8, 4, 16_384),
    "24 sessions on 4, all fit": _sessions(24, 4, 16_384),
    "100 sessions on 8, all fit": _sessions(100, 8, 16_384),
    "200 sessions on 8, all fit": _sessions(200, 8, 16_384),
    "100 sessions on 8, half fits": _sessions(100, 8, 700),
    "100 sessions on 8, a tenth fits": _sessions(100, 8, 256),
    "idle fleet": ["fleet workers=8", f"prompts 750 rate=0.5 text=sys:4096,own*:64..2048 {OUTPUT}"],
    "at the limit, nothing shared": [
        "fleet workers=8",
        "prompts 800 rate=36 text=own*:512..8192 output=50..250",
    ],
    "at the limit, two applications": [
        "fleet workers=8",
        f"prompts 400 rate=33 text=one:4096,{LONG} {OUTPUT}",
        f"prompts 400 rate=33 text=two:2048,{LONG} {OUTPUT}",
    ],
    "system prompt of 64, 8 workers": [
        "fleet workers=8",
        f"prompts 400 rate=40 ids=64 text=sys:64,own*:64..2048 {OUTPUT}",
    ],
    "system prompt of 64, 64 workers": [
        "fleet workers=64",
        f"prompts 1200 rate=320 ids=64 text=sys:64,own*:64..2048 {OUTPUT}",
    ],
    "system prompt of 512, 64 workers": _system(64, 512, 320, "own*:64..2048"),
    "two models, a system prompt each": [
        "fleet workers=8 models_apart=yes",
        f"prompts 250 rate=20 model=one text=one:4096,{QUESTIONS} {OUTPUT}",
        f"prompts 250 rate=10 model=two text=two:4096,{LONG} {OUTPUT}",
    ],
    "half the workers half as fast, nothing shared": [
        HALF_SLOW,
        "prompts 400 rate=15 text=own*:512..8192 output=50..250",
    ],
    "half the workers half as fast, system prompt of 4,096": [
        HALF_SLOW,
        f"prompts 400 rate=24 text=sys:4096,{LONG} {OUTPUT}",
    ],
    "half the workers half as fast, 50 sessions": [
        f"{HALF_SLOW} block_count=16384",
        f"sessions 50 turns=10 rate=5 text=s*:1024 grow=512 think=1..3 {OUTPUT}",
    ],
    "at the limit, half the workers half as fast": [
        HALF_SLOW,
        "prompts 800 rate=26 text=own*:512..8192 output=50..250",
    ],
}

TUNING = frozenset(list(CASES)[::2])
"""The half by which numbers are chosen; the others are held out."""
