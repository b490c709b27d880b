"""All backends by name: built-in ones, ones of installed packages, and ones that a program registers.

In a benchmark's child process late imports keep the libraries of other engines out of memory.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from swin_quant.backends.backend import Backend
from swin_quant.base.errors import UsageError, offered
from swin_quant.base.extras import announced
from swin_quant.base.progress import log

if TYPE_CHECKING:
    from swin_quant.score.engine import Engine
    from swin_quant.score.options import EngineOptions

BUILT_IN = ("fastertransformer", "onnx", "tensorrt", "onnxruntime", "openvino", "torchscript", "executorch", "cuda")
ENTRY_POINTS = "swin_quant.backends"  # the entry point group in which an installed package names its BACKEND
_registered: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Add a backend to this process. UsageError if another backend has its name."""
    if backends().get(backend.name, backend) != backend:
        raise UsageError(f"backend {backend.name!r}: there is one of that name already: choose another")
    _registered[backend.name] = backend
    return backend


def backends() -> Mapping[str, Backend]:
    """Every backend by name, built-in ones first."""
    return MappingProxyType({**_found(), **_registered})


def targets() -> dict[str, Backend]:
    """Backends that `export` writes for."""
    return {name: backend for name, backend in backends().items() if backend.exports}


def engines() -> dict[str, Backend]:
    """Backends with an engine."""
    return {name: backend for name, backend in backends().items() if backend.load}


def takers(artifact: str) -> list[Backend]:
    """Backends whose engine runs artifacts of a kind."""
    return [backend for backend in engines().values() if artifact in backend.runs]


def engines_for(artifact: str) -> tuple[str, ...]:
    """Engines that run a kind of artifact, directly or after a build of their own."""
    return tuple(name for name, one in engines().items() if one.exports and one.exports.artifact == artifact)


def target_named(name: str) -> Backend:
    """The backend of that name, which exports. UsageError lists the known names."""
    if name not in (known := targets()):
        raise UsageError(f"no backend {name!r}{offered(name, known)}")
    return known[name]


def engine_named(name: str) -> Backend:
    """The backend of that name, which has an engine. UsageError lists the known names."""
    if name not in (known := engines()):
        raise UsageError(f"no engine {name!r}{offered(name, known)}")
    return known[name]


def engine_loader(name: str) -> Callable[..., Any]:
    """The `load(artifact, options)` of an engine."""
    return engine_named(name).loader


@cache
def _found() -> dict[str, Backend]:
    """The BACKEND of each built-in module and of each installed package that announces one."""
    found = {name: importlib.import_module(f"swin_quant.backends.{name}").BACKEND for name in BUILT_IN}
    for who, backend in announced(ENTRY_POINTS, "Backend", lambda one: isinstance(one, Backend)):
        if found.setdefault(backend.name, backend) != backend:
            log.warning("%s: left out, another backend is called %s", who, backend.name)
    return found


def artifact_engine(file: str, backend: Backend, options: "EngineOptions") -> "Engine":
    """An artifact on the engine of `backend`, which is registered first: a new process may not know it."""
    from swin_quant.backends.artifact import read_artifact

    return register(backend).loader(read_artifact(file), options)
