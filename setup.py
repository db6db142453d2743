"""The native parts; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup


def native(name: str, folders: list[str]) -> Extension:
    """A module of a .pyx file, and of the headers that it is made of."""
    headers = [path for folder in folders for path in Path(folder).glob("native/*.[hp]*")]
    return Extension(
        name,
        [f"{name.replace('.', '/')}.pyx"],
        include_dirs=["."],
        depends=[*map(str, Path().glob("*/**/*.pxd")), *map(str, headers)],
        # Products and sums are rounded one by one, as numpy does.
        extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-function", "-ffp-contract=off"],
    )


setup(
    ext_modules=[
        native("indexer.kernel", ["indexer"]),
        native("router.core.counts", []),
        native("router.decision.ranking", ["indexer", "router/decision", "router/wire"]),
        native(
            "router.desk.answer_writer",
            ["indexer", "router/decision", "router/desk", "router/wire"],
        ),
        native("router.fleet.load_columns", ["indexer"]),
        native("router.fleet.recent_blocks", ["indexer", "router/fleet"]),
        native("router.reservations.steps", ["indexer"]),
        native("router.wire.batches", ["router/wire"]),
        native("router.wire.received", ["router/wire"]),
    ]
)
