"""Memory of one training step for Swin-T, B and L: writes docs/results/memory.md. No GPU is needed, nothing is run.

    python benchmarks/memory.py [--batch 32] [--ranks 4] [--output docs/results/memory.md]
    python benchmarks/memory.py --device cuda --output out/memory.md

Counted as in step_memory.py, on tensors without values, for AdamW and the frozen ranges of ft-mode1. On a GPU a step
also runs, and its peak stands beside the count.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from pages import save, script_parser, versions_here
from step_memory import checkpointed_bytes, saved_bytes, state_bytes
from torch._subclasses.fake_tensor import FakeTensorMode

from swin_quant.base.cpu import reproducible
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model
from swin_quant.models.layers import Swin
from swin_quant.quant.policy import apply_policy, load_policy, quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.train.optim import make_optimizer
from swin_quant.train.recipe import Optimizer

MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224_22kto1k_finetune",
    "swin_large_patch4_window12_384_22kto1k_finetune",
)


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, default=Path("docs/results/memory.md"))
    args = parser.parse_args()
    lines = [
        "# Memory of a training step",
        "",
        f"GiB, counted on tensors without values (`python benchmarks/memory.py --batch {args.batch} --ranks"
        f" {args.ranks}`, torch {torch.__version__}): AdamW, batch {args.batch} a GPU. *State*: weights, gradients and"
        f" moments on one GPU; *FSDP2* the same on each of {args.ranks}; with `--offload` it lies on the CPU and a GPU"
        " holds about one"
        " block of it. *Kept* is what autograd holds when the forward pass ends; *checkpointing* computes blocks again."
        " Temporaries of single operations and the allocator's slack come on top.",
        "",
        f"| model | training | precision | state | FSDP2 x {args.ranks} | kept | kept, checkpointing |",
        "|---|---|---|---|---|---|---|",
    ]
    if args.device == "cuda":
        lines[2] += (
            f" *Peak* is the most that was allocated in a step on {torch.cuda.get_device_name()}, beside its batch;"
            f" *over* is how much that is above state and kept. {versions_here()}."
        )
        lines[-2] += " peak | over | peak, checkpointing | over |"
        lines[-1] += "---|---|---|---|"
    for name in args.models:
        for training in ("float", "QAT"):
            for precision in ("O0", "O1"):
                state, kept, checkpointed = (value / 2**30 for value in counted(name, training, precision, args.batch))
                cells = [f"{value:.2f}" for value in (state, state / args.ranks, kept, checkpointed)]
                for counted_bytes, saving in ((kept, False), (checkpointed, True)) if args.device == "cuda" else ():
                    most = peak(name, training, precision, args.batch, saving) / 2**30
                    cells += [f"{most:.2f}", f"{100 * (most / (state + counted_bytes) - 1):+.0f} %"]
                lines.append("| " + " | ".join([name, training, precision, *cells]) + " |")
                print(lines[-1], flush=True)
    save(args.output, "\n".join(lines) + "\n")


def counted(name: str, training: str, precision: str, batch: int) -> tuple[int, int, int]:
    """Bytes of state, of the forward pass's saved tensors, and of these with checkpointing."""
    cfg = load_config(find_config(name))
    with torch.device("meta"):
        model = build_model(cfg)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        prepare(model, training)
        images = torch.empty(batch, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE)
        labels = torch.empty(batch, dtype=torch.int64)

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "O1"):
                return F.cross_entropy(model(images).float(), labels)

        return state_bytes(model), saved_bytes(model, forward), checkpointed_bytes(model, forward)


def prepare(model: Swin, training: str) -> None:
    """Training mode, with quantization if wanted."""
    if training == "QAT":
        apply_policy(model, load_policy("ft-mode1"))
        for node in named_nodes(model).values():
            node.amax = torch.ones((), device=model.head.weight.device)
        quantize(model)
    model.train()


def peak(name: str, training: str, precision: str, batch: int, checkpointing: bool) -> int:
    """The peak of bytes allocated on the GPU in the second of two steps, without the pictures."""
    cfg = load_config(find_config(name))
    torch.cuda.empty_cache()
    model = build_model(cfg).cuda()
    prepare(model, training)
    for stage in model.layers:
        stage.checkpointing = checkpointing
    optimizer = make_optimizer(model, Optimizer(), batch)
    images = torch.randn(batch, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE, device="cuda")
    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "O1"):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() - images.nbytes


if __name__ == "__main__":
    main()
