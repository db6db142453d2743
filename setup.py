"""The native parts; all else is in pyproject.toml.

With KVROUTE_COMPILED=1, as wheels and images are built, the modules of COMPILED are compiled to C
by mypyc. They are plain Python and run as they are without it, at twice the time.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

COMPILED = [
    "events/feed/predictions.py",
    "indexer/hashing.py",
    "router/decide/core/admission.py",
    "router/decide/core/core.py",
    "router/decide/core/fleet_turns.py",
    "router/decide/core/reservation_life.py",
    "router/decide/core/tally.py",
    "router/decide/decision/decider.py",
    "router/decide/decision/decision.py",
    "router/decide/decision/pairs.py",
    "router/api/desk/desk.py",
    "router/api/desk/reports.py",
    "router/api/desk/request_codec.py",
    "router/api/desk/stream_items.py",
    "router/api/desk/tenant.py",
    "router/fleet/eligibility.py",
    "router/fleet/pools.py",
    "router/fleet/state.py",
    "router/net/http2/calm.py",
    "router/net/http2/frames.py",
    "router/net/http2/known_headers.py",
    "router/net/http2/machine.py",
    "router/net/http2/requests.py",
    "router/net/http2/sending.py",
    "router/net/http2/streams.py",
    "router/net/listener/held.py",
    "router/decide/queue/admission_queue.py",
    "router/decide/queue_limits/bounds.py",
    "router/request/narrowing.py",
    "router/request/prompt.py",
    "router/fleet/reservations/ids.py",
]
"""What every request goes through, from HTTP/2's frames to the decision. mypyc takes no msgspec
Struct, no asynchronous generator, no exception that is a dataclass, and of a generator that is let
go halfway it runs no `finally`; coroutines that wait for others are not worth it either: those
stand in other modules."""
ROUNDING = "-ffp-contract=off"
"""Products and sums are rounded one by one, as numpy and Python do."""

COMPLETE = "-Werror=switch"
"""A switch over kinds of policies has a case for each."""


def native(name: str, folders: list[str]) -> Extension:
    """A module of a .pyx file, and of the headers that it is made of."""
    headers = [path for folder in folders for path in Path(folder).glob("native/*.[hp]*")]
    return Extension(
        name,
        [f"{name.replace('.', '/')}.pyx"],
        include_dirs=["."],
        depends=[*map(str, Path().glob("*/**/*.pxd")), *map(str, headers)],
        extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-function", COMPLETE, ROUNDING],
    )


def compiled() -> list[Extension]:
    """COMPILED as extensions, which share one library; none unless it is asked for."""
    if os.environ.get("KVROUTE_COMPILED") != "1":
        return []
    from mypyc.build import mypycify  # the only use of it

    # Types are checked by `make check`; here some of the packages that they are of may be missing.
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *COMPILED]
    # Debug information has the build's paths.
    extensions: list[Extension] = mypycify(options, group_name="kvroute", debug_level="0")
    for extension in extensions:  # some share a list of arguments
        extension.extra_compile_args = [*extension.extra_compile_args, ROUNDING]
    return extensions


setup(
    ext_modules=[
        native("indexer.kernel", ["indexer"]),
        native("indexer.copies", ["indexer"]),
        native("router.decide.core.counts", []),
        native(
            "router.decide.decision.ranking",
            ["indexer", "router/decide/decision", "router/fleet", "router/request/wire"],
        ),
        native(
            "router.api.desk.answer_writer",
            [
                *("indexer", "router/decide/decision", "router/api/desk", "router/fleet"),
                "router/request/wire",
            ],
        ),
        native("router.fleet.reservations.load_columns", ["indexer", "router/fleet"]),
        native("router.fleet.recent_blocks", ["indexer", "router/fleet"]),
        native("router.fleet.reservations.steps", ["indexer"]),
        native("router.request.wire.batches", ["router/request/wire"]),
        native("router.request.wire.received", ["router/request/wire"]),
        *compiled(),
    ]
)
