"""The operators of `plugins/openvino`, compiled for the OpenVINO and the CPU at hand: which files have them."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from swin_quant.backends.artifact import Artifact
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.extras import library as installed
from swin_quant.base.progress import log
from swin_quant.base.shipped import plugins_dir
from swin_quant.base.yaml_file import read_yaml
from swin_quant.config.outputs import FEATURES
from swin_quant.operators.compiling import compiled
from swin_quant.operators.plugins import plugins_of

DOMAIN = "swin_quant"
SWITCH = "SWIN_QUANT_OPERATORS"  # an environment variable: 0 compiles and loads nothing
NODES = {"roll": "Roll", "relu": "Relu", "attention": "Attention"}  # operator -> its node's name (extension.cpp)
FAST_DEPTH, FAST_TOKENS = 32, 64  # channels of a head and tokens of a window of its kernel (attention_vnni.hpp)
_LEAST = "avx512-vnni"  # the kind whose gain is told on CPUs that are not measured
_WHAT = "OpenVINO's window attention"


def sources() -> Path:
    """The folder of their C++."""
    return plugins_dir("openvino")


def library() -> Path:
    """Their library, compiled at first use. SwinQuantError says in a line why there is none."""
    found = _library()
    if isinstance(found, str):
        raise SwinQuantError(found)
    return found


@cache
def _library() -> Path | str:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if (kind := cpu_kind()) is None:
        return "this CPU has no AVX-512 VNNI"
    try:
        return compiled(sources(), _WHAT, (f"openvino {installed('openvino', 'openvino').__version__}", kind))
    except SwinQuantError as error:
        return str(error)


def cpu_kind() -> str | None:
    """The kind of this CPU, as `measured.yaml` names it; None for one without AVX-512 VNNI."""
    import torch

    has: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    if not has.get("avx512_vnni"):
        return None
    return "amx" if has.get("amx_int8") else "avx512-vnni"


def gain(architecture: str, kind: str) -> float | None:
    """How many times as fast files with the operators are, at the batch where they gain least; None: not measured."""
    times = read_yaml(sources() / "measured.yaml", "table of measurements").get(kind, {}).get(architecture)
    return min(without / with_ for without, with_ in times.values()) if times else None


def are_default(config: Mapping[str, Any]) -> bool:
    """Whether files of the model of this configuration have the operators where nothing else is said.

    They do where they were measured to be faster on this kind of CPU, and run here; a warning says why they do not run.
    """
    model = config.get("MODEL", {})
    family = model.get(str(model.get("TYPE")).upper(), {})
    if model.get("OUTPUT_KIND") == FEATURES or not {"EMBED_DIM", "NUM_HEADS", "WINDOW_SIZE"} <= family.keys():
        return False
    is_fast = family["EMBED_DIM"] == FAST_DEPTH * family["NUM_HEADS"][0] and family["WINDOW_SIZE"] ** 2 <= FAST_TOKENS
    return is_fast and (gain(model["TYPE"], cpu_kind() or _LEAST) or 0) > 1 and run_here()


def run_here() -> bool:
    """Whether the library is there; a warning says why it is not."""
    try:
        return bool(library())
    except SwinQuantError as error:
        if os.environ.get(SWITCH) != "0":
            times = gain("swin", cpu_kind() or _LEAST)
            _tell(f"{_WHAT} is not compiled: {error}: a plain file, which took a Swin-T {times:.2f} times as long")
        return False


def has_operators(artifact: Artifact) -> bool:
    """Whether the nodes of an artifact that OpenVINO does not know are all of the library, by the artifact's card."""
    plugins = plugins_of(tuple(artifact.record["options"].get("plugin") or ())).values()
    return bool(plugins) and all((one.domain, one.name) == (DOMAIN, NODES.get(one.operator)) for one in plugins)


def libraries_of(artifact: Artifact) -> tuple[str, ...]:
    """The library that the nodes of an artifact need; a warning says why they run as plain nodes instead."""
    if not has_operators(artifact):
        return ()
    try:
        return (str(library()),)
    except SwinQuantError as error:
        _tell(f"{artifact.file}: its operators run as plain nodes, slower: {error}")
        return ()


@cache
def _tell(message: str) -> None:
    """Warn once."""
    log.warning("%s", message)
