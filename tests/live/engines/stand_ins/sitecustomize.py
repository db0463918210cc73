"""What SGLang imports that has no build for a CPU: read at the start of each of its processes, by PYTHONPATH.

`sgl_kernel` (CUDA kernels) and `torchvision` (a CUDA build) are modules whose every name is there and raises when it is
called. Of all kernels a Llama on a CPU without AMX, with torch's own attention, calls one; that is here.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Never

VERSIONS = {"sgl_kernel": "0.4.10", "torchvision": "0.28.0"}
#: SGLang has a substitute of its own where this cannot be imported.
LEFT_OUT = {"sgl_kernel.scalar_type"}


class InterpolationMode(enum.Enum):
    """Named in signatures; no image is ever resized."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, _row_length: int) -> None:
    """Write the cache slots of each request behind those that it has."""
    lengths = (ends - starts).tolist()
    for row, start, new in zip(rows.tolist(), starts.tolist(), slots.split(lengths), strict=True):
        table[row, start : start + len(new)] = new.to(table.dtype)


PRESENT = {"InterpolationMode": InterpolationMode, "assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu}


class StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        """Return what is there, else a function that raises RuntimeError."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in PRESENT:
            return PRESENT[name]

        def missing(*_: Any, **__: Any) -> Never:
            raise RuntimeError(f"{self.__name__}.{name} is a stand-in")

        missing.__name__ = name
        return missing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins, and loads them."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is stood in for."""
        if name.partition(".")[0] not in VERSIONS or name in LEFT_OUT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module."""
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        """Give it a version and a place."""
        module.__path__ = []
        module.__version__ = VERSIONS[module.__name__.partition(".")[0]]


sys.meta_path.insert(0, Finder())
