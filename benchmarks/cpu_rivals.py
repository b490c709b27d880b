"""Other tools' quantizations for cpu_engines.py, NNCF's and ONNX Runtime's, from the plain float graph, and their
engines."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.cpu import usable_cores
from swin_quant.score.candidate import BenchCandidate
from swin_quant.score.engine import Engine

CALIBRATION = 16  # pictures


def nncf_candidates(float_file: str, folder: Path, side: int, convolutional: bool) -> list[BenchCandidate]:
    """NNCF's quantization, as for a transformer if it is one, with its defaults and without SmoothQuant, beside
    bfloat16."""
    if not importlib.util.find_spec("nncf"):
        print("nncf is not installed: left out")
        return []
    import nncf
    import openvino

    off = nncf.AdvancedSmoothQuantParameters(matmul=-1, convolution=-1)
    ways = {"default": {}, "no SmoothQuant": {
        "advanced_parameters": nncf.AdvancedQuantizationParameters(smooth_quant_alphas=off)}}  # fmt: skip
    found = []
    for name, extra in ways.items():
        file = folder / f"nncf_{name.replace(' ', '_')}.xml"
        if not file.exists():
            model = openvino.Core().read_model(float_file)
            nncf_quantized(model, seeded(CALIBRATION, side), file, convolutional, **extra)
        load = partial(openvino_ir, str(file), usable_cores())
        found.append(
            BenchCandidate(f"openvino int8 NNCF {name} +bfloat16", load, file.with_suffix(".bin"), "openvino float32")
        )
    return found


def nncf_quantized(model: Any, pictures: Tensor, file: Path, convolutional: bool, **extra: Any) -> Path:
    """An OpenVINO model quantized by NNCF, as for a transformer unless it is convolutional, as an IR file."""
    import nncf
    import openvino

    data = nncf.Dataset([picture[None].numpy() for picture in pictures])
    kind = None if convolutional else nncf.ModelType.TRANSFORMER
    quantized = nncf.quantize(model, data, model_type=kind, subset_size=len(pictures), **extra)
    openvino.save_model(quantized, str(file), compress_to_fp16=False)
    return file


def openvino_ir(file: str, threads: int, float_type: str = "bf16") -> Engine:
    """An IR file run as our own engine runs ONNX: for latency, one stream, fixed shapes."""
    import openvino

    core = openvino.Core()
    settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": float_type}  # fmt: skip
    compiled = {}

    def run(images: Tensor) -> Tensor:
        if tuple(images.shape) not in compiled:
            model = core.read_model(file)
            model.reshape(list(images.shape))
            compiled[tuple(images.shape)] = core.compile_model(model, "CPU", settings).create_infer_request()
        request = compiled[tuple(images.shape)]
        request.infer([images.numpy()], share_inputs=True)
        return torch.from_numpy(request.get_output_tensor(0).data.copy())

    return Engine("openvino", "int8", "NNCF", run)


def own_quantization(float_file: str, folder: Path, side: int, everything: bool = False) -> BenchCandidate:
    """ONNX Runtime's static quantization: uint8 activations, int8 weights a column, only linears, no quantized results.

    That is its fastest setting for transformers (products of two activations stay float). `everything`: its default,
    for convolutional networks.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    graph = onnx.load(float_file).graph
    stored = {tensor.name for tensor in graph.initializer}
    linears = [node.name for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in stored]

    class Pictures(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(seeded(CALIBRATION, side))

        def get_next(self) -> dict | None:
            picture = next(self.left, None)
            return None if picture is None else {graph.input[0].name: picture[None].numpy()}

    some = {} if everything else {
        "nodes_to_quantize": linears, "extra_options": {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}
    }  # fmt: skip
    file = folder / f"onnxruntime_own{'_all' if everything else ''}.onnx"
    if not file.exists():
        quantize_static(
            float_file, str(file), Pictures(), quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, **some,
        )  # fmt: skip
    load = partial(onnxruntime_file, str(file), usable_cores())
    return BenchCandidate(
        f"onnxruntime int8 its own, {'all' if everything else 'linears'}", load, file, "onnxruntime float32"
    )


def onnxruntime_file(file: str, threads: int) -> Engine:
    """Any ONNX file on ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    return Engine("onnxruntime", "int8", "its own", run)


def seeded(count: int, side: int) -> Tensor:
    """Noise pictures other than those on which logits are compared."""
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))
