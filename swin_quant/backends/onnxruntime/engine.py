"""ONNX Runtime on the CPU: the float32 or float16 graph of a file as it stands, int8 where the file quantizes."""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.onnx_reader import inside as reader
from swin_quant.backends.onnx_reader.checks import first_line, nodes
from swin_quant.backends.onnx_reader.file import OnnxFile, as_input, as_output, read_model, verified
from swin_quant.backends.onnxruntime import SKIP_QDQ
from swin_quant.backends.releases import refuse_wrong
from swin_quant.backends.saturation import exact_kernels, warn
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.quant.outputs import Output
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "onnxruntime"
_TYPES = {  # the type of a product -> the runtime's operators that compute in it
    "int8": {"QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"}
    | {"QGemm", "QLinearConv", "ConvInteger", "QAttention"},
    "int4": {"MatMulNBits"},  # int4 weights; it rounds its other operand to int8
    "float32": {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose"}
    | {"Attention", "MultiHeadAttention"},
}
_STOP_SPINNING = "session.force_spinning_stop=1"  # else its idle threads slow down the engine that is timed next
# It makes a float Gemm of a linear with a fixed batch and a bias of one dimension; int8 fusions do not take that.
_HARMFUL = ("MatMulAddFusion",)  # our own files have had other biases since


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """The engine of an ONNX artifact. UsageError for another type or device, and for extensions."""
    if options.float_type not in (None, "float32"):
        raise UsageError(f"{NAME}: runs what is not int8 in float32 on a CPU, not in {options.float_type}")
    if options.device != "cpu":
        raise UsageError(f"{NAME}: runs on a CPU here, not on {options.device}")
    if options.extensions:
        raise UsageError(f"{NAME}: takes no ‹extension›, which is for OpenVINO: it runs the functions in the file")
    refuse_wrong(NAME, library("onnxruntime", "onnx").__version__, artifact)
    file = verified(artifact)
    exact = exact_kernels(NAME, artifact)
    session = _session(file, options, exact)
    known = {
        "library": f"{NAME} {library('onnxruntime', 'onnx').__version__}",
        "opset": file.opset,
        "device": session.get_providers()[0].removesuffix("ExecutionProvider").lower(),
        "threads": session.get_session_options().intra_op_num_threads or None,
        "float_type": "float32",
        "optimize": options.optimize,
        "caution": warn(NAME, artifact) if options.optimize else None,
    }

    def run(images: Tensor) -> Output:
        return as_output(_outputs(session, file, list(file.outputs), images), images)

    details = Details(known, partial(_gemms, file, options, exact))
    precision, policy = artifact.record["precision"], get_policy_name(artifact)
    return Engine(NAME, precision, policy, run, max_batch=file.batch, details=details)


def _session(
    file: OnnxFile,
    options: EngineOptions,
    exact: str | None,
    optimized: Path | None = None,
    harmful: Sequence[str] = _HARMFUL,
    batch: int | None = None,
) -> Any:
    """A session. `exact`: the setting against saturation; `optimized`: the file to write the optimized graph to.

    `harmful`: fusions to leave out of quantized files; `batch`: fixed on loading.
    """
    onnxruntime = library("onnxruntime", "onnx")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # log fatal errors only: the rest are exceptions
    settings.intra_op_num_threads = options.threads or 0
    levels = onnxruntime.GraphOptimizationLevel
    settings.graph_optimization_level = levels.ORT_ENABLE_ALL if options.optimize else levels.ORT_DISABLE_ALL
    for entry in filter(None, (_STOP_SPINNING, exact, SKIP_QDQ if file.float8 else None)):
        settings.add_session_config_entry(*entry.split("="))
    if optimized:
        settings.optimized_model_filepath = str(optimized)
    if batch:
        (first,) = [value for value in read_model(file.path).graph.input if value.name == file.input]
        settings.add_free_dimension_override_by_name(first.type.tensor_type.shape.dim[0].dim_param, batch)
    try:
        out = list(harmful) if file.quantizers else []
        return onnxruntime.InferenceSession(str(file.path), settings, ["CPUExecutionProvider"], disabled_optimizers=out)
    except Exception as error:  # its exceptions have no common class of their own
        raise SwinQuantError(f"{file.path}: {NAME} cannot load it: {first_line(error)}") from error


def _outputs(session: Any, file: OnnxFile, names: list[str], images: Tensor) -> list[Any]:
    given = as_input(file, images)
    try:
        return session.run(names, given)
    except Exception as error:
        raise SwinQuantError(f"{file.path}: {NAME} cannot run it: {first_line(error)}") from error


def products(file: OnnxFile, batch: int | None = None) -> Mapping[str, str]:
    """Matrix product -> the type that a session with default settings runs it in; `batch`: fixed on loading."""
    return _gemms(file, EngineOptions(), None, (), batch)


def _gemms(
    file: OnnxFile,
    options: EngineOptions,
    exact: str | None,
    harmful: Sequence[str] = _HARMFUL,
    batch: int | None = None,
) -> Mapping[str, str]:
    """Matrix product -> the type that it runs in, from the runtime's optimized graph."""
    onnx = library("onnx", "onnx")
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder, "optimized.onnx")
        _session(file, options, exact, optimized, harmful, batch)
        graph = onnx.load(str(optimized), load_external_data=False).graph
    return {
        re.sub(r"/\w+Fusion/?$", "", node.name) or node.output[0]: kind  # from qkv.MatMul/MatMulAddFusion
        for node in nodes(graph)
        for kind, operators in _TYPES.items()
        if node.op_type in operators
    }


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """`onnx_reader.inside.inside` on ONNX Runtime."""

    def start(file: OnnxFile, copy: OnnxFile, names: list[str]) -> Callable[[Tensor], Mapping[str, Any]]:
        session = _session(copy, options, exact_kernels(NAME, artifact))
        return lambda images: dict(zip(names, _outputs(session, file, names, images), strict=True))

    return reader.inside(artifact, start)
