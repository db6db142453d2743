"""Import first: SGLang's imports of GPU and media libraries resolve to inert dummies.

transformers is imported before, so that it decides for itself that torchvision is absent. And where
SGLang's prefill workers would copy page numbers from the GPU by way of pinned memory, they take the
other way that the code has. Runs in SGLang's environment.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import transformers.image_processing_base
import transformers.image_utils
import transformers.utils.import_utils  # noqa: F401

NAMES = frozenset(
    {
        "cuda", "decord", "deep_gemm", "flash_attn", "flashinfer", "quack", "sgl_kernel",
        "tilelang", "torch_memory_saver", "torchaudio", "torchvision", "xformers",
    }
)  # fmt: skip


class _Any(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _dummy(name)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _dummy(name: str) -> type:
    return _Any(name, (), {"__init__": _nothing, "__call__": _nothing})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _dummy(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"


class _NoPinnedMemory(importlib.abc.MetaPathFinder):
    """Mooncake's sender as if it took page numbers as an array only, as other senders do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sglang.srt.disaggregation.mooncake.conn":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def patched(module: types.ModuleType) -> None:
                exec_module(module)
                module.__dict__["MooncakeKVSender"].supports_host_tensor_indices = False

            spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _NoPinnedMemory())
sys.meta_path.append(_Finder())
