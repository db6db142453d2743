"""The native kernel; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "indexer.kernel",
            ["indexer/kernel.pyx"],
            depends=[str(header) for header in Path("indexer/native").glob("*.h")],
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-function"],
        )
    ]
)
