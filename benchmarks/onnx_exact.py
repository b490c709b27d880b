"""The difference between exported ONNX files on ONNX Runtime and torch: writes docs/results/onnx_exact.md.

    python benchmarks/onnx_exact.py --data-path DIR [--models ...] [--pictures 500] [--work out/onnx_exact]

DIR is CIFAR-10 as zip files and maps. Calibrated on 80 training pictures, policy `tensorrt`; less than a minute a
model on a core.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from pages import EXAMPLES, RESULTS, place, script_parser

import swin_quant as sq
from swin_quant.data.loader import load_batches
from swin_quant.data.sampling import chunks
from swin_quant.quant.policy import dequantize, quantize

PAGE = RESULTS / "onnx_exact.md"
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
POLICY, BATCH = "tensorrt", 100
FORMS = {
    "float32": {"precision": "float"},
    "float16": {"precision": "float", "float_type": "float16"},
    "int8, float32": {"policy": POLICY},
    "int8, float16": {"policy": POLICY, "float_type": "float16"},
}
HEAD = f"""# ONNX files beside torch

Micro Swins of examples/checkpoints on ONNX Runtime, all optimizations, on a CPU; validation pictures of CIFAR-10.
Policy `{POLICY}`, ranges of 80 training pictures. SQNR of the logits is against the float model in torch; agreement is
with what the file was made from, float or fake-quantized, in torch. Written by `python benchmarks/onnx_exact.py`.
"""


def measured(name: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of a model."""
    weights = EXAMPLES / f"{name}.safetensors"
    model = sq.load(weights, config=weights.with_suffix(".yaml"))
    sq.calibrate(model, sq.pictures(args.data_path, "train", 80), POLICY)
    shown = sq.pictures(args.data_path, "val", args.pictures)
    val = shown.open()
    batches = load_batches(val, model.preprocess, chunks(shown.indices(val), BATCH))
    images = torch.cat([batch.images for batch in batches])
    quantize(model.module)
    fake_quant = logits(model.module, images)
    dequantize(model.module)
    floats = logits(model.module, images)
    for form, options in FORMS.items():
        file = sq.export(model, "onnx", args.work / name / form.replace(", ", "_"), **options)
        found = logits(file.load("onnxruntime"), images)
        agreement = (found.argmax(1) == (fake_quant if "int8" in form else floats).argmax(1)).float().mean().item()
        yield [form, f"{sqnr_db(floats, found):.1f}", f"{100 * agreement:.1f}"]
    yield ["fake quantization in torch", f"{sqnr_db(floats, fake_quant):.1f}", "-"]


@torch.inference_mode()
def logits(run, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.as_tensor(run(part)).double() for part in images.split(BATCH)])


def sqnr_db(exact: torch.Tensor, found: torch.Tensor) -> float:
    return 10 * (exact.square().sum() / (found - exact).square().sum()).log10().item()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--work", type=Path, default=Path("out/onnx_exact"))
    args = parser.parse_args()
    for name in args.models:
        lines = ["file | SQNR, dB | agreement, %", "--- | --- | ---"]
        for row in measured(name, args):
            lines.append(" | ".join(row))
            print(name, lines[-1], flush=True)
        table = "".join(f"| {line} |\n" for line in lines)
        place(PAGE, HEAD, f"{name}, {args.pictures} pictures", table)


if __name__ == "__main__":
    main()
