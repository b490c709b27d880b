"""The effect of each known difference of FasterTransformer's kernels: writes docs/results/fastertransformer.md.

    python benchmarks/fastertransformer.py --data-path DIR [--zip] [--pictures N] CHECKPOINT_calib.pth ...

Each calibrated checkpoint, its run card beside it, is exported for FasterTransformer in mode 1. Its emulated logits on
pictures of `val` are compared with those of the same emulator with one thing changed: to the kernels' behaviour, or to
the most that it can be. Nothing here ran on a GPU.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from pages import RESULTS, save, script_parser
from torch import Tensor

from swin_quant.backends.fastertransformer import emulator, gelu_bias
from swin_quant.backends.fastertransformer.emulator import Emulator, as_half, layer_norm, to_int8
from swin_quant.backends.fastertransformer.manifest import Stored, read_export
from swin_quant.backends.fastertransformer.weights import WeightSource
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.cpu import reproducible
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sources import open_pictures
from swin_quant.models.layers import Swin
from swin_quant.quant.policy import load_policy
from swin_quant.score.engine import torch_engines
from swin_quant.verbs.export import export_checkpoint

BATCH = 100
TANH, SOFTMAX, MERGE = torch.Tensor.tanh, torch.Tensor.softmax, Emulator.merge
Run = Callable[[Tensor], Tensor]


def one_ulp_off(x: Tensor) -> Tensor:
    """tanh moved to the neighbouring float16, up or down at random."""
    noise = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    bits = TANH(x).view(torch.int16)
    return torch.where(x == 0, bits, bits + noise).view(torch.float16)


def fused_gelu(step: float, bias: Tensor, levels: float) -> Tensor:
    """`gelu_table` as if the compiler contracted each float16 product and sum to one rounding."""
    x = (torch.arange(-128, 128).double() * as_half(step) + bias[:, None].double()).half()
    cube = (as_half(0.044715) * x * x).double()
    inner = as_half(0.7978845608028654) * (cube * x + x.double()).half()
    gelu = x * (as_half(0.5) * inner.tanh().double() + 0.5).half()
    return to_int8((gelu * as_half(levels)).float()).flatten()


def off(x: Tensor, by: float) -> Tensor:
    """Change each value by up to a share of itself."""
    noise = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1
    return x * (1 + by * noise)


def backwards(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return layer_norm(x.flip(-1), weight.flip(-1), bias.flip(-1), epsilon).flip(-1)


def one_pass(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * torch.rsqrt(variance + epsilon) * weight.float() + bias.float()


def merged_in_one_pass(self: Emulator, x: Tensor, m: emulator.Merging) -> Tensor:
    with patch.object(emulator, "layer_norm", one_pass):
        return MERGE(self, x, m)


def with_float_scale(stored: Stored, model: Swin) -> Stored:
    """exp of the float32 logit_scale, rounded once."""
    source, tensors = WeightSource(model, int8=False), dict(stored.tensors)
    for slot in stored.entries:
        if slot.part == "attn.logit_scale":
            tensors[slot.name] = source(slot).half()
    return replace(stored, tensors=tensors)


def with_half_bias(stored: Stored, model: Swin) -> Stored:
    """Position biases by an MLP in float16, as FasterTransformer's exporter computes them."""
    tensors = dict(stored.tensors)
    for slot in stored.entries:
        if slot.part.endswith("relative_position_bias") and slot.layout != "empty":
            half = copy.deepcopy(model.layers[slot.place[0]].blocks[slot.place[1]].attn).half()
            with torch.no_grad():
                tensors[slot.name] = half.relative_position_bias().half()
    return replace(stored, tensors=tensors)


@contextmanager
def patched(stored: Stored, target: object, name: str, value: object, misread: bool = False) -> Iterator[Run]:
    """Inside the context, the emulator is built and run with an attribute replaced."""
    with patch.object(target, name, value):
        yield Emulator(stored, misread=misread)


@contextmanager
def as_it_is(run: Run) -> Iterator[Run]:
    yield run


def changes(stored: Stored, model: Swin) -> dict[str, Callable]:
    """Changes by name, each a context manager."""
    policy, widest = load_policy("ft-mode1"), stored.case.widest
    # Channels that the kernel misreads, or at the same share of channels as in Swin-L's last stage.
    first = gelu_bias.ROUND if gelu_bias.is_misread(widest) else widest * 2 // 3 // 4 * 4
    of_all = {
        "fake-quant instead of the kernels": lambda: as_it_is(
            list(torch_engines(model, torch.device("cpu"), None, [policy]).values())[-1]
        ),
        f"fc1's bias misread from channel {first} of {widest}": lambda: patched(
            stored, gelu_bias, "ROUND", first, misread=True
        ),
        "tanh a unit in the last place off": lambda: patched(stored, torch.Tensor, "tanh", one_ulp_off),
        "GELU's products and sums contracted": lambda: patched(stored, emulator, "gelu_table", fused_gelu),
        "softmax off by up to 2^-19": lambda: patched(
            stored, torch.Tensor, "softmax", lambda *rest: off(SOFTMAX(*rest), 2.0**-19)
        ),
        "norms off by up to 2^-21": lambda: patched(
            stored, emulator, "layer_norm", lambda *rest: off(layer_norm(*rest), 2.0**-21)
        ),
        "norms summed in another order": lambda: patched(stored, emulator, "layer_norm", backwards),
    }
    of_v2 = {
        "merging's variance in one pass": lambda: patched(stored, Emulator, "merge", merged_in_one_pass),
        "exp of logit_scale in float32": lambda: as_it_is(Emulator(with_float_scale(stored, model), misread=False)),
        "position biases by an MLP in float16": lambda: as_it_is(
            Emulator(with_half_bias(stored, model), misread=False)
        ),
    }
    return of_all | (of_v2 if stored.case.form.version == 2 else {})


def pictures(card: RunCard, data_path: str, zipped: bool, count: int) -> tuple[Tensor, Tensor]:
    """The first pictures of val and their labels."""
    found = open_pictures(data_path, "val", zip_mode=zipped)
    preprocess = Preprocess.from_dict(card.preprocess)
    chosen = range(0, len(found), max(len(found) // count, 1))[:count]
    return torch.stack([preprocess(found.read(i)) for i in chosen]), torch.tensor([found.labels[i] for i in chosen])


def logits(run: Run, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([run(batch).float() for batch in images.split(BATCH)])


def rows(checkpoint: str, data_path: str, zipped: bool, count: int) -> Iterator[str]:
    """One line for each change."""
    card = RunCard.read(card_path(checkpoint))
    images, labels = pictures(card, data_path, zipped, count)
    with tempfile.TemporaryDirectory() as folder:
        made, model = export_checkpoint(checkpoint, "fastertransformer", folder, policy=load_policy("ft-mode1"))
        stored = read_export(open_artifact(made.file))
    before = logits(Emulator(stored, misread=False), images)
    right = (before.argmax(1) == labels).double()
    for change, context in changes(stored, model).items():
        with context() as run:
            after = logits(run, images)
        noise, gained = after - before, (after.argmax(1) == labels).double() - right
        sqnr = 10 * (before.square().sum() / noise.square().sum()).log10()
        yield (
            f"| {card.name} | {100 * right.mean():.2f} | {change} | {noise.abs().mean():.4f} | {noise.abs().max():.3f} "
            f"| {100 * (after.argmax(1) == before.argmax(1)).double().mean():.2f} | {sqnr:.1f} "
            f"| {100 * gained.mean():+.2f} ± {100 * gained.std() / len(gained) ** 0.5:.2f} |"
        )


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--zip", action="store_true")
    parser.add_argument("--pictures", type=int, default=1000)
    args = parser.parse_args()
    lines = [
        f"{args.pictures} pictures of {Path(args.data_path).name}/val, mode 1, fused attention: the emulator with one "
        "thing changed, against itself. Δ top-1 with its paired standard error.",
        "",
        "| model | top-1 | changed | mean abs Δlogit | max | agreement % | SQNR dB | Δ top-1 |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for checkpoint in args.checkpoints:
        for line in rows(checkpoint, args.data_path, args.zip, args.pictures):
            print(line, flush=True)
            lines.append(line)
    save(RESULTS / "fastertransformer.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
