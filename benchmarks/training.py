"""Accuracy, time and memory of training with quantization: sections of docs/results/training.md.

    python benchmarks/training.py accuracy --data-path CIFAR10 [--work DIR] [--models NAME ...] [--bits 8,8 4,8 4,4]
    python benchmarks/training.py memory [--models NAME ...] [--batch 32] [--ranks 4]
    python benchmarks/training.py step [--models NAME ...] [--batch 64] [--threads 1] [--compile] [--precision O0 O1]

accuracy: the micro Swin V1 and V2 of examples/checkpoints at each pair of bits of weights and activations: PTQ in both
int8 modes, then QAT in mode 1 with frozen and with learned ranges, by the recipes micro_w*a*, with the float model as
the teacher. A finished run in --work is not repeated, an interrupted one goes on.
memory: what a training step of Swin-T, B and L needs, counted on tensors without values. No GPU is needed.
step: time and memory of a QAT step beside a float step with random weights, on a GPU if there is one. A step is
forward, cross entropy, backward, clipping and AdamW. Times are the least of several steps, which take turns. Memory is
the peak allocated on a GPU; on a CPU weights, gradients, optimizer state, and the tensors that autograd saves.
"""

import argparse
import json
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pages import EXAMPLES, RESULTS, cpu, join_cells, place, script_parser, swin_quant, versions_here
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swin_quant.base.cpu import reproducible
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model
from swin_quant.models.layers import Swin
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.train.amax import settle_granularity
from swin_quant.train.optim import make_optimizer
from swin_quant.train.parallel import Precision
from swin_quant.train.recipe import Optimizer

MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
WAYS = ("frozen", "learned")  # ranges
MODES = {"PTQ mode 1": "ft-mode1", "PTQ mode 2": "ft-mode2"}
FULL = (
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224_22kto1k_finetune",
    "swin_large_patch4_window12_384_22kto1k_finetune",
)
DIGITS = ("swin_digits", "swinv2_digits")
ADAM_STATES = 2  # float32 moments for every weight


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("accuracy", "memory", "step"))
    parser.add_argument("--models", nargs="+", help="for accuracy: examples; else: shipped configurations")
    parser.add_argument("--data-path", type=Path, help="for accuracy: CIFAR-10 as zip files and maps")
    parser.add_argument("--work", type=Path, default=Path("out/training"))
    parser.add_argument("--bits", nargs="+", default=["8,8", "4,8", "4,4"])
    parser.add_argument("--batch", type=int, help="default: 32 for memory, 64 for step")
    parser.add_argument("--ranks", type=int, default=4, help="for memory")
    parser.add_argument("--threads", type=int, help="for step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--policy", default="ft-mode1", help="for step")
    parser.add_argument("--precision", nargs="+", default=["O0"], choices=("O0", "O1"), help="for step")
    parser.add_argument("--compile", action="store_true", help="for step: torch.compile too")
    parser.add_argument("--output", type=Path, default=RESULTS / "training.md")
    args = parser.parse_args()
    if args.what == "accuracy" and not args.data_path:
        parser.error("accuracy needs --data-path")
    title, head, rows = {"accuracy": accuracy, "memory": memory, "step": steps}[args.what](args)
    table = "\n".join([join_cells(head), "|---" * len(head) + "|", *map(join_cells, rows)])
    print(table)
    said = "" if args.what != "step" else f"{versions_here()}. Written by `python benchmarks/training.py step`.\n\n"
    place(args.output, title, f"{said}{table}\n")


def accuracy(args: argparse.Namespace) -> tuple[str, Sequence[str], list[list[str]]]:
    figures = [*MODES, *(title for way in WAYS for title in (f"QAT {way}", f"{way}, unquantized"))]
    rows = []
    for name in args.models or MICRO:
        for weights, activations in (pair.split(",") for pair in args.bits):
            found = train(args.data_path, args.work, name, weights, activations)
            ptq = found["PTQ mode 1"]
            lost = -ptq["delta_acc1"] if -ptq["delta_acc1"] > 2 * ptq["delta_acc1_se"] else None
            won = [f"{1 + found[f'QAT {way}']['delta_acc1'] / lost:.0%}" if lost else "" for way in WAYS]
            cells = [name, f"W{weights}A{activations}", f"{found['float']['acc1']:.2f}"]
            rows.append([*cells, *(figure(found[title]) for title in figures), *won])
            print(*rows[-1], flush=True)
    head = ["model", "bits", "float", *figures, *(f"won back, {way}" for way in WAYS)]
    return "Accuracy on CIFAR-10", head, rows


def train(data: Path, work: Path, name: str, weights: str, activations: str) -> dict[str, Any]:
    """Calibrate, fine-tune and score a model at a pair of bits, whatever is missing; the results by column."""
    bits = f"w{weights}a{activations}"
    config, float_file = (EXAMPLES / f"{name}.{end}" for end in ("yaml", "safetensors"))
    known = ["--cfg", config, "--data-path", data, "--zip"]
    precision = [] if bits == "w8a8" else ["--wprec", weights, "--aprec", activations]
    calibrated = work / name / bits / "ptq" / f"{name}_calib.pth"
    if not calibrated.exists():
        swin_quant("calibrate", float_file, *known, "--policy", "ft-mode1", *precision, "--output", calibrated.parent)
    if not results(calibrated):
        swin_quant("evaluate", calibrated, *known, "--half", "none", "--policy", *MODES.values(), *precision)
    ptq = results(calibrated)
    found = {"float": ptq[None, None, "float32"]}
    for title, mode in MODES.items():
        found[title] = next(result for (_, policy, _), result in ptq.items() if policy and policy.startswith(mode))
    for way in WAYS:
        trained = work / name / bits / name / way / f"{name}_qat.pth"
        if not results(trained):
            how = [
                "--policy",
                "ft-mode1",
                *precision,
                "--teacher",
                float_file,
                "--recipe",
                f"micro_{bits}",
                "--amax",
                way,
            ]
            output = ["--continue", "--half", "none", "--output", trained.parent]
            swin_quant("finetune", calibrated, *known, *how, *output)
        qat = results(trained)
        quantized = (result for (whose, policy, _), result in qat.items() if whose == "qat" and policy)
        found |= {f"QAT {way}": next(quantized), f"{way}, unquantized": qat["qat", None, "float32"]}
    return found


def results(checkpoint: Path) -> dict[tuple[str | None, str | None, str], dict[str, Any]]:
    """The results in the card of a checkpoint, by weights, policy and precision; none without a card."""
    file = checkpoint.with_suffix(".json")
    card = json.loads(file.read_text()) if file.exists() else {"results": []}
    return {(result.get("weights"), result["policy"], result["precision"]): result for result in card["results"]}


def figure(result: dict[str, Any]) -> str:
    return f"{result['acc1']:.2f}<br>{result['delta_acc1']:+.2f} ± {result['delta_acc1_se']:.2f}"


def memory(args: argparse.Namespace) -> tuple[str, Sequence[str], list[list[str]]]:
    batch, ranks = args.batch or 32, args.ranks
    rows = []
    for name in args.models or FULL:
        for training in ("float", "QAT"):
            for precision in ("O0", "O1"):
                state, kept, checkpointed = (value / 2**30 for value in counted(name, training, precision, batch))
                sizes = (f"{value:.2f}" for value in (state, state / ranks, kept, checkpointed))
                rows.append([name, training, precision, *sizes])
                print(*rows[-1], flush=True)
    head = ("model", "training", "precision", "state", f"FSDP2 x {ranks}", "kept", "peak, checkpointing")
    return f"Memory of a training step, batch {batch}", head, rows


def counted(name: str, training: str, precision: str, batch: int) -> tuple[int, int, int]:
    """Bytes of state, of the forward pass's saved tensors, and of a whole step's tensors with checkpointing."""
    cfg = load_config(find_config(name))
    with torch.device("meta"):
        model = build_model(cfg)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        set_training(model, training)
        images = torch.empty(batch, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE)
        labels = torch.empty(batch, dtype=torch.int64)

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "O1"):
                return F.cross_entropy(model(images).float(), labels)

        return state_bytes(model), saved_bytes(model, forward), checkpointed_bytes(model, forward)


def set_training(model: Swin, training: str) -> None:
    """Training mode, with quantization if wanted."""
    if training == "QAT":
        apply_policy(model, load_policy("ft-mode1"))
        for node in named_nodes(model).values():
            node.amax = torch.ones((), device=model.head.weight.device)
        quantize(model)
    model.train()


def steps(args: argparse.Namespace) -> tuple[str, Sequence[str], list[list[str]]]:
    if args.threads:
        torch.set_num_threads(args.threads)
    device, batch = torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.batch or 64
    rows: list[list[str]] = []
    for name in args.models or DIGITS:
        for level in args.precision:
            for compiled in (False, True)[: 1 + args.compile]:
                rows += measured(name, batch, args, level, compiled, device)
                print(*rows[-3:], sep="\n", flush=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{cpu()}, {torch.get_num_threads()} threads"
    title = f"One QAT step against one float step ({where}, batch {batch}, policy {args.policy})"
    head = ("model", "precision", "", "ranges", "nodes", "ms a step", "time", "MB", "memory")
    return title, head, rows


def measured(
    name: str, batch: int, args: argparse.Namespace, level: str, compiled: bool, device: torch.device
) -> list[list[str]]:
    """The rows of a model: a step in float, with frozen and with learned ranges."""
    cfg = load_config(find_config(name))
    images = torch.randn(batch, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE, device=device)
    labels = torch.randint(cfg.MODEL.NUM_CLASSES, (batch,), device=device)
    precision = Precision.choose(level, "auto", device)
    ways = {way: prepared(cfg, way, args.policy, images, precision, compiled) for way in ("float", *WAYS)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.steps + 1):
        for way, (_, step) in ways.items():  # in turns, so that a busy machine slows all equally
            start = now(device)
            step(images, labels)
            if number:
                times[way].append(now(device) - start)
    rows, base, fastest = [], peak(*ways["float"], images, labels, precision, device, compiled), min(times["float"])
    for way, (model, step) in ways.items():
        size, least = peak(model, step, images, labels, precision, device, compiled), min(times[way])
        nodes = len(enabled_nodes(model)) if way != "float" else 0
        cells = [name, level, "compiled" if compiled else "eager", way, str(nodes), f"{1e3 * least:.1f}"]
        memory = [f"{size / 1e6:.0f}", f"{size / base:.2f} x"] if size and base else ["", ""]
        rows.append([*cells, f"{least / fastest:.2f} x", *memory])
    return rows


def prepared(
    cfg, mode: str, policy: str, images: Tensor, precision: Precision, compiled: bool
) -> tuple[nn.Module, Callable]:
    """A model, and a function for one whole training step."""
    torch.manual_seed(0)
    model = build_model(cfg).to(images.device)
    if mode != "float":
        apply_policy(model, load_policy(policy))
        calibrate(model, [images[:4]], Method("percentile"))
        settle_granularity(model, enabled_nodes(model))
        quantize(model)
    if mode == "learned":
        for node in enabled_nodes(model).values():
            node.learn_range()
    model.train()
    optimizer = make_optimizer(model, Optimizer(), len(images))
    network = torch.compile(model) if compiled else model

    def step(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(precision.logits(network, images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.optimizer = optimizer
    return model, step


def peak(
    model: nn.Module, step: Callable, images: Tensor, labels: Tensor, precision: Precision, device, compiled: bool
) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(images, labels)
        return torch.cuda.max_memory_allocated()
    if compiled:
        return None
    kept = saved_bytes(model, lambda: F.cross_entropy(precision.logits(model, images), labels))
    return kept + state_bytes(model, step.optimizer)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves in `forward()` for its backward pass, without the weights and buffers of `model`."""
    sizes: dict[int, int] = {}  # of storages, by address
    held: list[Tensor] = []  # since a freed address could be used again

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        held.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(size for address, size in sizes.items() if address not in known)


class Living(TorchDispatchMode):
    """Inside the context, counts the bytes of all storages that operations make and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # noqa: ANN001, ANN204
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.most = max(self.most, self.now)
        return result

    def _free(self, address: int) -> None:
        self.now -= self.sizes.pop(address)


def checkpointed_bytes(model: Swin, forward: Callable[[], Tensor]) -> int:
    """The most bytes that `forward()` and its backward pass hold with activation checkpointing, temporaries included,
    without the weights, buffers and gradients of `model`.

    The most is held where the first stage is computed again; nearly all gradients are there by then.
    """
    stages = list(model.layers)
    for stage in stages:
        stage.checkpointing = True
    with Living() as living:
        for tensor in [*model.parameters(), *model.buffers()]:  # are there before the step
            living.sizes[tensor.untyped_storage()._cdata] = 0
        forward().backward()
    for stage in stages:
        stage.checkpointing = False
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    model.zero_grad(set_to_none=True)
    return living.most - gradients


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of weights and buffers, of a gradient for every trainable weight, and of the optimizer's state.

    Without an optimizer, AdamW's state: two float32 moments of every trainable weight.
    """
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        states = ADAM_STATES * 4 * sum(parameter.numel() for parameter in trained)
    else:
        values = [value for state in optimizer.state.values() for value in state.values()]
        states = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return weights + sum(parameter.nbytes for parameter in trained) + states


if __name__ == "__main__":
    main()
