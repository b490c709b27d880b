"""The operators of `plugins/openvino`, compiled for the OpenVINO and the CPU at hand: which files have them."""

import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.file import read_model
from swin_quant.backends.openvino import COMPILED, DOMAIN
from swin_quant.backends.saturation import SAFE_BITS
from swin_quant.base.cpu import within
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.extras import library as installed
from swin_quant.base.files import plugins_dir
from swin_quant.base.progress import tell_once
from swin_quant.base.yaml_file import read_yaml
from swin_quant.config.outputs import FEATURES
from swin_quant.models.registry import architectures
from swin_quant.operators.plugins import FAST_DEPTH, FAST_HEADS, FAST_TOKENS, compiled, parse_plugins

LIMIT = "ONEDNN_MAX_CPU_ISA"  # an environment variable: the instructions that OpenVINO may use
# What a CPU has for int8, the best first -> its kind, which build.sh knows.
KINDS = {"amx_int8": "amx", "avx512_vnni": "avx512-vnni", "avx_vnni": "avx-vnni", "avx2": "avx2"}
SWITCH = "SWIN_QUANT_OPERATORS"  # an environment variable: 0 compiles and loads nothing
NODES = COMPILED | {"roll": "Roll", "relu": "Relu"}
# Operator -> the one whose measurements hold for it on CPUs where it has none. On maps the same kernel replaces more
# nodes: pads and rolls, too.
_MEASURED_AS = {"map_branch": "attention_branch"}
_LEAST = "avx512-vnni"  # the kind whose gain is told on CPUs that are not measured
_WHAT = "OpenVINO's window attention and MLP"


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
        return "this CPU has no AVX2"
    failure = ""
    for isa in ("amx", "avx512-vnni") if kind == "amx" else (kind,):  # where tiles fail, vectors may not
        try:
            return compiled(sources(), _WHAT, {"OPENVINO": installed("openvino", "openvino").__version__, "ISA": isa})
        except SwinQuantError as error:
            failure = str(error)
    return failure


def cpu_kind() -> str | None:
    """The kind of this CPU, as `measured.yaml` names it, within the limit on OpenVINO; None: it has no AVX2."""
    import torch

    has: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    allowed = within(os.environ.get(LIMIT, ""))
    return next((kind for name, kind in KINDS.items() if has.get(name) and name in allowed), None)


def gain(architecture: str, operator: str) -> float:
    """How many times as fast files with an operator are here, at the batch where they gain least; 0: not measured."""
    table = read_yaml(sources() / "measured.yaml", "table of measurements").get(cpu_kind() or _LEAST, {})
    times = table.get(operator, {}).get(architecture, {})
    return min((without / with_ for without, with_ in times.values()), default=0.0)


def are_default(config: Mapping[str, Any]) -> bool:
    """Whether files of the model of this configuration have the operators where nothing else is said.

    They do where they were measured to be faster on this kind of CPU, and run here; a warning says why they do not run.
    """
    model, family = config.get("MODEL", {}), _find_windows(config)
    if not family:
        fits = model.get("OUTPUT_KIND") != FEATURES and _fits_one_window(json.dumps(config))  # maps are of any size
        return fits and are_faster_here("vit", "token_branch")
    has_maps = model.get("OUTPUT_KIND") == FEATURES or isinstance(config.get("DATA", {}).get("IMG_SIZE"), list)
    fast = {"map_branch": FAST_TOKENS["attention_branch"]} if has_maps else FAST_TOKENS
    tokens = family["WINDOW_SIZE"] ** 2
    operator = next((name for name, most in fast.items() if tokens <= most), None)
    if operator is None or family["EMBED_DIM"] != FAST_DEPTH * family["NUM_HEADS"][0]:
        return False
    return are_faster_here(model["TYPE"], operator)


def are_all_compiled(config: Mapping[str, Any]) -> bool:
    """Whether every int8 product of the model of this configuration is in operators by default.

    Those of a Swin are: its first and last layer are float. Other networks quantize these, too.
    """
    return bool(_find_windows(config)) and are_default(config)


def _find_windows(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a network with windows, which Swins are; empty for others."""
    model = config.get("MODEL", {})
    family = model.get(str(model.get("TYPE")).upper(), {})
    return family if {"EMBED_DIM", "NUM_HEADS", "WINDOW_SIZE"} <= family.keys() else {}


@cache
def _fits_one_window(config: str) -> bool:
    """Whether all attentions of a configuration, as JSON, look at as many tokens as the compiled one is fast for."""
    cfg = CfgNode(json.loads(config))
    one = architectures().get(cfg.get("MODEL", {}).get("TYPE"))
    found = one.one_window(cfg) if one and one.one_window else None
    return found is not None and found[1] <= FAST_HEADS.get(found[0], 0)


def are_faster_here(architecture: str, operator: str = "attention") -> bool:
    """Whether files of an architecture have an operator here: it was measured to be faster, and the library is there.

    A warning says why the library is not.
    """
    if (gain(architecture, operator) or gain(architecture, _MEASURED_AS.get(operator, operator))) <= 1:
        return False
    try:
        return bool(library())
    except SwinQuantError as error:
        if os.environ.get(SWITCH) != "0":
            times = prod(max(gain("swin", operator), 1) for operator in NODES)
            tell_once(
                f"{_WHAT} are not compiled: {error}. The file is plain: a Swin-T took {times:.2f} times as long",
                logging.WARNING,
            )
        return False


def has_operators(artifact: Artifact) -> bool:
    """Whether the nodes of an artifact that OpenVINO does not know are all of the library, by the artifact's card."""
    plugins = parse_plugins(tuple(artifact.record["options"].get("plugin") or ())).values()
    return bool(plugins) and all((one.domain, one.name) == (DOMAIN, NODES.get(one.operator)) for one in plugins)


def find_libraries(artifact: Artifact) -> tuple[str, ...]:
    """The library that the nodes of an artifact need; a warning says why they run as plain nodes instead."""
    if not has_operators(artifact):
        return ()
    try:
        return (str(library()),)
    except SwinQuantError as error:
        run_plain(artifact, error)
        return ()


def run_plain(artifact: Artifact, error: SwinQuantError) -> None:
    """Warn that the operators of an artifact run as plain nodes for this reason."""
    tell_once(f"{artifact.file}: its operators run as plain nodes, slower: {error}", logging.WARNING)


def run_exact_products(artifact: Artifact) -> bool:
    """Whether the library is there, and every int8 product of an artifact is inside its nodes or has weights of 7 bits.

    The library's products are exact on every CPU; plain nodes multiply what Q/DQ pairs have rounded.
    """
    if not find_libraries(artifact):
        return False
    from onnx import TensorProto
    from onnx.numpy_helper import to_array

    graph = read_model(artifact.file).graph
    if all(node.op_type != "QuantizeLinear" for node in graph.node):
        return True
    most = 1 << (SAFE_BITS - 1)
    weights = [one for one in graph.initializer if one.data_type == TensorProto.INT8 and one.dims]
    safe = {one.name for one in weights if -most <= (levels := to_array(one)).min() and levels.max() < most}
    exact = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in safe}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    return all(exact.intersection(node.input) for node in products)


def stream_in_half(model: Any) -> None:
    """Let our operators on the residual stream of an OpenVINO model, which runs in bfloat16, read and write that.

    The type of their result is that of what they read. Between two of them nothing is converted.
    """
    ours = {(COMPILED[operator], DOMAIN) for operator in COMPILED.keys() - {"attention"}}
    kinds = ((one, one.get_type_info()) for one in model.get_ordered_ops())
    nodes = [one for one, kind in kinds if (kind.name, kind.version_id) in ours]
    if not nodes:
        return
    opset13: Any = installed("openvino.opset13", "openvino")
    in_half: dict[str, Any] = {}  # the result of one of them in float32 -> as it is
    for node in nodes:
        readers = list(node.output(0).get_target_inputs())
        source = node.input_value(0)
        half = in_half.get(source.get_node().get_friendly_name()) or opset13.convert(source, "bf16").output(0)
        node.input(0).replace_source_output(half)
        result = opset13.convert(node.output(0), "f32")
        in_half[result.get_friendly_name()] = node.output(0)
        for reader in readers:
            reader.replace_source_output(result.output(0))
    model.validate_nodes_and_infer_types()
