"""ExecuTorch programs of ours beside ExecuTorch's own quantizer and OpenVINO, on random weights at published sizes.

    PYTHONPATH=. python benchmarks/npu_and_phone.py swin_tiny_patch4_window7_224 deit_tiny_patch16_224 resnet18

Of each model it counts the int8 products of the lowered program, and compares outputs with fake-quant and with float
(SQNR, dB). `explained` is fake-quant whose int8 products have inputs rounded by the token or the map, as XNNPACK has
them, beside fake-quant: what a program of policy `executorch` must have, too. Times are CPU time of one thread for one
picture, the least of `--rounds` and their median, in turns: the processes of others do not count. A name that no config
has is timm's. Rows are added to the tables of docs/results/executorch.csv.

    PYTHONPATH=. python benchmarks/npu_and_phone.py swin_tiny_patch4_window7_224 --npu a16

`--npu` compares both forms of ONNX instead, under each of these policies: on ONNX Runtime, on OpenVINO and, where
`onnxruntime-qnn` is installed, in the simulator of Qualcomm's NPU.
"""

import logging
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pages import RESULTS, read_table, script_parser, write_table
from torch import Tensor, nn

import swin_quant as sq
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.executorch.export import products_in
from swin_quant.backends.registry import engine_loader, exporter
from swin_quant.base.compat import import_timm
from swin_quant.base.files import configs_dir
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantizing
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

PROGRAMS = ["executorch/executorch", "executorch/float", "openvino/cpu", "pt2e"]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, metavar="TARGET/POLICY|pt2e")
    parser.add_argument("--npu", nargs="+", metavar="POLICY|FILE")
    parser.add_argument("--output", type=Path, default=RESULTS / "executorch.csv", metavar="FILE.csv")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in options.models:
        rows = forms(name, options.npu) if options.npu else measured(name, options.rounds, options.programs)
        table = {"table": "ONNX for NPUs" if options.npu else "Programs"}
        known = read_table(options.output) + [table | row for row in rows]
        head = list(dict.fromkeys(key for row in known for key in row))
        cells = ([row.get(key) for key in head] for row in known)
        write_table(options.output, head, (["" if cell is None else str(cell) for cell in row] for row in cells))
        for row in rows:
            print(*row.values(), sep="  ", flush=True)


def network(name: str) -> Classifier:
    """A model of random weights: of a shipped config, else timm's, wrapped."""
    torch.manual_seed(0)
    if found := next(configs_dir().glob(f"*/{name}.yaml"), None):
        return build_model(load_config(str(found))).eval()
    timm = import_timm()
    size = timm.models.get_pretrained_cfg(name).input_size
    wrapped: Classifier = sq.wrap(timm.create_model(name, pretrained=False).eval(), size[-1]).module
    return wrapped.eval()


def sqnr(expected: Tensor, found: Tensor) -> float:
    return round(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()).item(), 1)


def measured(name: str, rounds: int, programs: list[str]) -> list[dict[str, Any]]:
    """The rows of one model, timed in turns; SQNR in dB, times in milliseconds of one CPU core."""
    model = network(name)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, *model.input_shape, generator=generator)
    calibrate(model, [images], Method("max"))
    with torch.inference_mode():
        expected = model(images[:1])
    rows, runs = list[dict[str, Any]](), list[Callable[[Tensor], Tensor]]()
    with tempfile.TemporaryDirectory() as folder:
        for program in programs:
            target, _, policy = program.partition("/")
            fake = explained = None
            if policy:
                engine, artifact = exported(model, name, target, policy, folder)
                counts = f"{engine.details['int8_gemms']} of {engine.details['all_gemms']}"
                run, size = engine, artifact.file.stat().st_size
                fake = simulated(model, policy, images[:1])
            else:
                from executorch.runtime import Runtime

                content, counts = pt2e(model, images)
                forward, size = Runtime.get().load_program(content).load_method("forward"), len(content)
                run = lambda images, forward=forward: forward.execute((images.contiguous(),))[0]  # noqa: E731
            if program == "executorch/executorch":
                kinds = artifact.record["options"]["products"]
                int8 = [layer for layer, kind in kinds.items() if kind == "int8"]
                explained = sqnr(fake, with_rounded_inputs(model, policy, int8, images[:1]))
            out = run(images[:1])
            beside = None if fake is None else sqnr(fake, out)
            row = {"model": name, "program": program, "products": counts, "megabytes": round(size / 1e6, 1)}
            row |= {"explained": explained, "sqnr_fake_quant": beside, "sqnr_float": sqnr(expected, out)}
            rows.append(row)
            runs.append(run)
        spent = [list[float]() for _ in rows]
        for _ in range(rounds):
            for times, run in zip(spent, runs, strict=True):
                start = time.process_time()
                run(images[:1])
                times.append(1e3 * (time.process_time() - start))
    for row, times in zip(rows, spent, strict=True):
        row |= {"cpu_ms": round(min(times), 1), "median_ms": round(statistics.median(times), 1)}
    return rows


def exported(model: Classifier, name: str, target: str, policy: str, folder: str) -> tuple[Engine, Artifact]:
    """A file of the model, and its engine of one thread."""
    from swin_quant.backends.executorch.export import ExecutorchOptions
    from swin_quant.backends.onnx.options import OnnxOptions

    precision = "float" if policy == "float" else "int8"
    card = RunCard(name, {}, {}, policy=load_policy(policy).to_dict())
    options = (
        OnnxOptions(precision, target, batch=1, plain=True) if target != "executorch" else ExecutorchOptions(precision)
    )
    artifact = exporter(target)(model, card, folder, options)
    return engine_loader(target)(artifact, EngineOptions(threads=1)), artifact


def simulated(model: Classifier, policy: str, images: Tensor) -> Tensor | None:
    """Fake-quant's logits; None for float."""
    if policy == "float":
        return None
    apply_policy(model, load_policy(policy))
    with torch.inference_mode(), quantizing(model):
        return model(images)


def with_rounded_inputs(model: Classifier, policy: str, layers: list[str], images: Tensor) -> Tensor:
    """Fake-quant's logits with the inputs of these layers rounded to 255 steps from least to most: of each token of a
    linear, of the whole map of a convolution."""

    def rounded(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        dims = [-1] if isinstance(layer, nn.Linear) else [*range(x.dim())]
        low, high = x.amin(dims, keepdim=True).clamp(max=0), x.amax(dims, keepdim=True).clamp(min=0)
        step = ((high - low) / 255).clamp(min=1e-12)
        zero = (-128 - low / step).round()
        return ((((x / step).round() + zero).clamp(-128, 127) - zero) * step,)

    handles = [model.get_submodule(layer).register_forward_pre_hook(rounded) for layer in layers]
    out = simulated(model, policy, images)
    for handle in handles:
        handle.remove()
    assert out is not None
    return out


def pt2e(model: Classifier, images: Tensor) -> tuple[bytes, str]:
    """The program of ExecuTorch's documentation: XNNPACKQuantizer, static, per channel, calibrated on `images`."""
    import executorch.kernels.quantized  # noqa: F401  # what XNNPACK leaves of SwinV2's position tables
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    with torch.no_grad():
        traced = torch.export.export(model.requires_grad_(False), (images[:1],), strict=False).module()
        quantizer = xnnpack.XNNPACKQuantizer().set_global(
            xnnpack.get_symmetric_quantization_config(is_per_channel=True)
        )
        prepared = prepare_pt2e(traced, quantizer)
        for image in images:
            prepared(image[None])
        traced = torch.export.export(convert_pt2e(prepared), (images[:1],), strict=False)
        lowered = to_edge_transform_and_lower(traced, partitioner=[XnnpackPartitioner()])
    kinds = list(products_in(lowered.exported_program().graph_module).values())
    return bytes(lowered.to_executorch().buffer), f"{kinds.count('int8')} of {len(kinds)}"


def forms(name: str, policies: list[str]) -> list[dict[str, Any]]:
    """Both forms of a file under each policy, on one picture: SQNR to fake-quant in dB, for the simulator (`qnn`) to
    ONNX Runtime; `levels`: the quantized tensors whose levels the ordinary form has, too, in any order."""
    from swin_quant.backends.onnx.options import OnnxOptions

    model, rows = network(name), list[dict[str, Any]]()
    images = torch.randn(4, *model.input_shape, generator=torch.Generator().manual_seed(1))
    calibrate(model, [images], Method("max"))
    preprocess = Preprocess(model.input_shape[-1], False, "bicubic", (0.5,) * 3, (0.5,) * 3).to_dict()
    with tempfile.TemporaryDirectory() as folder:
        for policy in policies:
            fake = simulated(model, policy, images[:1])
            card = RunCard(name, {}, preprocess, policy=load_policy(policy).to_dict())
            is_wide = any(node.setting.bits > 8 for node in enabled_nodes(model).values())
            plain = OnnxOptions(batch=1, opset=None if is_wide else 20)  # GELU as one operator
            found = list[tuple[Tensor, dict[str, list[int]]]]()
            for form, options in (("ordinary", plain), ("--npu", OnnxOptions(npu=True))):
                artifact = exporter("onnx")(model, card, folder, options)
                outs = {one: engine_loader(one)(artifact)(images[:1]) for one in ("onnxruntime", "openvino")}
                found.append((outs["onnxruntime"], levels(artifact.file, images[:1])))
                same = sum(histogram == found[0][1].get(key) for key, histogram in found[-1][1].items())
                logits = outs["onnxruntime"]
                row = {"model": name, "policy": policy, "form": form, "rank": highest_rank(artifact.file)}
                row |= {engine: sqnr(fake, out) for engine, out in outs.items()}
                row |= {"same_logits": torch.equal(found[0][0], logits), "levels": f"{same} of {len(found[-1][1])}"}
                rows.append(row | on_qnn(artifact.file, images[:1], logits))
    return rows


def highest_rank(file: Path) -> int:
    """The rank of the file's highest tensor."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(onnx.load(file), strict_mode=True).graph
    return max(len(value.type.tensor_type.shape.dim) for value in (*graph.input, *graph.value_info, *graph.output))


def levels(file: Path, images: Tensor) -> dict[str, list[int]]:
    """QuantizeLinear -> how often each level occurs, on ONNX Runtime without optimization."""
    import onnx
    import onnxruntime

    proto = onnx.load(file)
    names = {node.output[0]: node.name for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=output) for output in names)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"images": images.numpy()})
    counted = [torch.from_numpy(output.astype("int32")).flatten() for output in outputs]
    return {name: torch.bincount(one - one.min()).tolist() for name, one in zip(names.values(), counted, strict=True)}


def on_qnn(file: Path, images: Tensor, expected: Tensor) -> dict[str, Any]:
    """SQNR of the simulator of Qualcomm's NPU to `expected`, and the operators that it left to the CPU; None without
    `onnxruntime-qnn`."""
    import onnxruntime

    try:
        import onnxruntime_qnn as qnn
    except ImportError:
        return {"qnn": None, "left_to_cpu": ""}
    name = "QNNExecutionProvider"
    if not any(device.ep_name == name for device in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(name, qnn.get_library_path())
    device = next(device for device in onnxruntime.get_ep_devices() if device.ep_name == name)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    chosen = {"backend_path": qnn.get_qnn_htp_path(), "soc_model": "60"}  # without a model it compiles no file
    settings.add_provider_for_devices([device], chosen)
    try:
        session = onnxruntime.InferenceSession(str(file), settings)
    except Exception as error:
        return {"qnn": None, "left_to_cpu": str(error).splitlines()[0][:80]}
    (out,) = session.run(None, {"images": images.numpy()})
    parts = session.get_provider_graph_assignment_info()
    left = Counter(node.op_type for part in parts if part.ep_name != name for node in part.get_nodes())
    counts = " ".join(f"{count} {kind}" for kind, count in sorted(left.items()))
    return {"qnn": sqnr(expected, torch.from_numpy(out)), "left_to_cpu": counts}


if __name__ == "__main__":
    main()
