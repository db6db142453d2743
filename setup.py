"""The native kernel; all else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "indexer.kernel",
            ["indexer/kernel.pyx"],
            depends=["indexer/native/xxh3.h", "indexer/native/block_table.h"],
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-function"],
        )
    ]
)
