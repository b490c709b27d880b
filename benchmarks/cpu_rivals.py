"""Rivals for cpu_engines.py: NNCF and ONNX Runtime from the float graph, PyTorch's own ways from the float model."""

import contextlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from measuring import BenchCandidate
from torch import Tensor, nn

from swin_quant.base.compat import import_timm
from swin_quant.base.cpu import usable_cores
from swin_quant.checkpoint import load_float
from swin_quant.config import from_dict
from swin_quant.config.sides import sides
from swin_quant.models import build_model
from swin_quant.score.engine import Engine, torch_engines

CALIBRATION = 16  # pictures


def nncf_candidates(
    float_file: str, folder: Path, side: int, convolutional: bool, threads: int | None = None
) -> list[BenchCandidate]:
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
        load = partial(openvino_ir, str(file), threads or usable_cores())
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


def openvino_ir(file: str, threads: int) -> Engine:
    """An IR file run as our own engine runs ONNX, with bfloat16 beside int8."""
    compiled = cache(lambda shape: compile_file(file, shape, threads, "bf16"))
    return Engine("openvino", "int8", "NNCF", lambda images: compiled(tuple(images.shape))(images)[0])


def compile_file(
    file: str | Path, shape: Sequence[int], threads: int, float_type: str
) -> Callable[[Tensor], list[Tensor]]:
    """A file on OpenVINO as our own engine runs ONNX: for latency, one stream, a fixed shape."""
    import openvino

    core = openvino.Core()
    settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": float_type}  # fmt: skip
    model = core.read_model(str(file))
    model.reshape(list(shape))
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def run(images: Tensor) -> list[Tensor]:
        request.infer([images.numpy()], share_inputs=True)
        return [torch.from_numpy(one.data.copy()) for one in request.output_tensors]

    return run


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
        left = iter(seeded(CALIBRATION, side))

        def get_next(self) -> dict | None:
            picture = next(self.left, None)
            return None if picture is None else {graph.input[0].name: picture[None].numpy()}

    some = {"nodes_to_quantize": linears, "extra_options": {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}}
    file = folder / f"onnxruntime_own{'_all' if everything else ''}.onnx"
    if not file.exists():
        quantize_static(
            float_file, str(file), Pictures(), quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, **({} if everything else some),
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
    return Engine("onnxruntime", "int8", "its own", lambda images: torch.from_numpy(
        session.run(None, {name: images.numpy()})[0]))  # fmt: skip


def torch_candidates(checkpoint: Path, config: Mapping[str, Any]) -> list[BenchCandidate]:
    """torch.jit.trace, which FasterTransformer's figures are relative to, torch.compile, and PT2E where torchao is
    installed."""
    ways: dict[str, tuple[Callable[..., Engine], dict[str, Any]]] = {
        "torch.jit.trace float32": (traced, {}),
        "torch.compile float32": (inductor_float, {"bfloat16": False}),
        "torch.compile bfloat16": (inductor_float, {"bfloat16": True}),
    }
    if importlib.util.find_spec("torchao"):
        ways["torch int8 PT2E"] = inductor_int8, {"bfloat16": False}
        ways["torch int8 PT2E +bfloat16"] = inductor_int8, {"bfloat16": True}
    else:
        print("torchao is not installed: PT2E is left out")
    return [
        BenchCandidate(name, partial(load, str(checkpoint), config, **options), checkpoint, "torch float32")
        for name, (load, options) in ways.items()
    ]


def float_engine(checkpoint: str, config: Mapping[str, Any]) -> Engine:
    """The float model in torch, in float32."""
    model = build_model(from_dict(config, checkpoint))
    load_float(model, checkpoint)
    return torch_engines(model, torch.device("cpu"), None)["float32"]


def float_model(checkpoint: str, config: Mapping[str, Any]) -> nn.Module:
    """The float weights of a checkpoint in timm's own module, as a user of PyTorch has it: of ours, whose layers have
    nodes, Inductor makes int8 products of few linears, and of a captured graph of none."""
    cfg = from_dict(config, checkpoint)
    model: nn.Module = build_model(cfg)
    load_float(model, checkpoint)
    timm, state = import_timm(), model.state_dict()
    if cfg.MODEL.TYPE == "timm":
        own = timm.create_model(cfg.MODEL.TIMM.ARCHITECTURE)
        own.load_state_dict({name: state[name] for name in own.state_dict()})
        return own.eval()
    names = cfg.MODEL.NAME, cfg.MODEL.NAME.replace("_patch4", "")  # V2's
    own = timm.create_model(next(name for name in names if timm.is_model(name)))
    family = importlib.import_module(type(own).__module__)
    missing, _ = own.load_state_dict(family.checkpoint_filter_fn(state, own), strict=False)  # Microsoft's names
    if lost := [name for name in missing if not name.endswith(("attn_mask", "relative_position_index"))]:
        raise RuntimeError(f"timm's {cfg.MODEL.NAME} lacks {lost[0]}")
    return own.eval()


def traced(checkpoint: str, config: Mapping[str, Any]) -> Engine:
    """The float model through torch.jit.trace and freeze."""
    model = float_model(checkpoint, config)

    @cache
    def compiled(shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        images = torch.zeros(shape)
        plain = torch.export.export(model, (images,)).module()
        return torch.jit.freeze(torch.jit.trace(plain, images, check_trace=False).eval())

    return Engine("torch.jit", "float32", None, lambda images: compiled(tuple(images.shape))(images))


def inductor_float(checkpoint: str, config: Mapping[str, Any], bfloat16: bool) -> Engine:
    """The float model by torch.compile with frozen weights, for each batch."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    kind = torch.bfloat16 if bfloat16 else torch.float32
    compiled = torch.compile(float_model(checkpoint, config).to(kind), dynamic=False)
    run = torch.no_grad()(lambda images: compiled(images.to(kind)).float())
    return Engine("torch.compile", "bfloat16" if bfloat16 else "float32", None, run)


def inductor_int8(checkpoint: str, config: Mapping[str, Any], bfloat16: bool) -> Engine:
    """PT2E: exported, quantized by torchao's X86 Inductor quantizer, compiled with frozen weights for each batch."""
    import torch._inductor.config as inductor
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model = float_model(checkpoint, config)
    inductor.freezing = True

    @cache
    def compiled(shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        exported = torch.export.export(model, (torch.zeros(shape),)).module()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported, quantizer)
        for pictures in seeded(CALIBRATION, shape[-1]).split(shape[0]):
            prepared(pictures)
        converted = convert_pt2e(prepared)
        if not any("dequantize" in str(node.target) for node in converted.graph.nodes):
            raise RuntimeError("PT2E quantized nothing")
        move_exported_model_to_eval(converted)
        return torch.compile(converted)

    def run(images: Tensor) -> Tensor:
        half = torch.autocast("cpu", torch.bfloat16) if bfloat16 else contextlib.nullcontext()
        with torch.no_grad(), half:
            return compiled(tuple(images.shape))(images)

    return Engine("torch", "int8", "PT2E", run)


def seeded(count: int, size: int | list[int]) -> Tensor:
    """Noise pictures, of one side or of a height and a width, other than those on which logits are compared."""
    return torch.randn(count, 3, *sides(size), generator=torch.Generator().manual_seed(1))
