"""The CUDA engine on the GPU that is here, beside what torch makes of the same networks.

    python benchmarks/cuda_engine.py [--models ...] [--batch 1 8 32 64] [--seconds 460] [--output FOLDER]

Random weights, ranges of noise: they cost what real ones cost. Times are the median of replays of a CUDA graph,
pictures taking turns; `--seconds` is the limit of all, and what is not reached in time is left out of the table. Writes
cuda_engine.md and cuda_engine.json. `--device cpu` is a dry run of this script, for micro models: it measures no GPU.

Beside our int8 and fp16: `trace` is torch.jit.trace of Microsoft's network (FasterTransformer's own baseline); eager,
compile (max-autotune) and torchao have timm's, whose attention is torch's scaled_dot_product_attention where it can be.
"""

import argparse
import importlib.util
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.cuda.binding import bind
from swin_quant.backends.cuda.choice import spec_for
from swin_quant.backends.cuda.choosing import fused_program
from swin_quant.backends.cuda.engine import machine_here
from swin_quant.backends.cuda.floors import floor_of
from swin_quant.backends.cuda.network import Network, pack
from swin_quant.base.compat import import_timm
from swin_quant.base.reproducible import reproducible
from swin_quant.config import load_config
from swin_quant.config.files import find_config
from swin_quant.models import build_model
from swin_quant.operators.roofline import Machine, load_machine
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import apply_policy

V1 = [f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")]
MODELS = (
    *V1,
    "swin_large_patch4_window7_224_22kto1k_finetune",
    *(f"swinv2_{size}_patch4_window8_256" for size in ("tiny", "small", "base")),
    *(f"swinv2_{size}_patch4_window16_256" for size in ("tiny", "small", "base")),
    "swin_base_patch4_window12_384_finetune",
    "swin_large_patch4_window12_384_22kto1k_finetune",
)
COMPILED = {(V1[0], 1), (V1[0], 32), (V1[2], 32)}  # a compilation of each takes a minute
REPLAYS, INPUTS, WARM_UP = 40, 4, 5
Run = Callable[[Tensor], object]
Contender = Callable[[nn.Module, int], Run]


@dataclass
class Row:
    """A network and a batch: milliseconds by contender, and the plan of the int8 list where the GPU is known."""

    model: str
    batch: int
    ms: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    operations: int = 0
    floor_ms: float | None = None


def main() -> None:
    reproducible()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 1, 8, 64])
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--gpu", help="whose peaks floors and fusions are computed from (default: by the GPU's name)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("out/cuda_engine"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda_engine.py: torch finds no GPU here: nothing was measured")
    device = torch.device(args.device)
    machine = (load_machine(args.gpu) if args.gpu else machine_here()) if args.device == "cuda" else None
    rows, notes, launches = measured(args.models, args.batch, device, machine, time.monotonic() + args.seconds)
    text = "\n".join([*heading(device, machine), *table(rows), "", *launches, *(f"* {note}" for note in notes)]) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "cuda_engine.md").write_text(text)
    (args.output / "cuda_engine.json").write_text(json.dumps([vars(row) for row in rows], indent=2))
    print(text)
    if not any("int8" in row.ms for row in rows):
        sys.exit("cuda_engine.py: our engine ran on none of them: see the notes")


def measured(
    models: list[str], batches: list[int], device: torch.device, machine: Machine | None, end: float
) -> tuple[list[Row], list[str], list[str]]:
    """Every contender on every network and batch, ours first, until the time is up; notes; lines of single launches."""
    rows = [Row(name, batch) for batch in batches for name in models]
    notes: list[str] = []
    launches: list[str] = []
    built: dict[str, nn.Module] = {}
    for name, make in contenders(device, machine).items():
        for row in rows:
            if time.monotonic() > end:
                notes.append(f"{name}: not reached in time from {row.model}, batch {row.batch} on")
                break
            if (
                name.startswith(("compile", "torchao"))
                and device.type == "cuda"
                and (row.model, row.batch) not in COMPILED
            ):
                continue
            try:
                if row.model not in built:
                    built[row.model] = network_of(row.model, device)
                model = built[row.model]
                images = torch.randn(INPUTS, row.batch, *shape_of(model), device=device)
                row.ms[name] = milliseconds(make(model, row.batch), images)
                print(f"{row.model} batch {row.batch} {name}: {row.ms[name]:.3f} ms", flush=True)
            except Exception as error:  # one contender's failure is a line of the table, not the end of it
                notes.append(f"{name}, {row.model}, batch {row.batch}: {type(error).__name__}: {str(error)[:300]!r}")
        if name == "int8" and "int8" in rows[0].ms:
            launches = list(single_launches(built[models[0]], models[0], batches[0], device, machine))
    for row in rows:
        if row.ms:
            plan(row, built[row.model], machine)
    return rows, notes, launches


def contenders(device: torch.device, machine: Machine | None) -> dict[str, Contender]:
    """By name, in the order of measuring; on a CPU, those that it can run."""
    found: dict[str, Contender] = {
        "int8": partial(engine, precision="int8", device=device, machine=machine),
        "fp16": partial(engine, precision="float", device=device, machine=machine),
        "trace fp16": partial(traced, device=device),
    }
    if device.type == "cpu":
        return found
    found |= {
        "eager fp16": partial(eager, dtype=torch.float16),
        "eager tf32": partial(eager, dtype=torch.float32, tf32=True),
        "eager fp32": partial(eager, dtype=torch.float32),
        "compile fp16": compiled,
    }
    if importlib.util.find_spec("torchao"):
        found["torchao int8"] = partial(compiled, prepare=by_torchao)
    return found


def engine(model: nn.Module, batch: int, precision: str, device: torch.device, machine: Machine | None) -> Run:
    """Our engine: a program bound to memory; the graph is `milliseconds`' own."""
    network = packed(model, precision)
    tensors = {name: tensor.to(device) for name, tensor in network.tensors.items()}
    bound = bind(fused_program(network.spec, batch, machine), tensors, network.scalars, device)

    def run(images: Tensor) -> None:
        bound.images.copy_(images)
        bound()

    return run


def packed(model: nn.Module, precision: str) -> Network:
    """Ours as the engine has it, once a model and precision."""
    kept = model.__dict__.setdefault("_packed", {})
    if precision not in kept:
        kept[precision] = pack(model, spec_for(model, precision))
    return kept[precision]


def traced(model: nn.Module, batch: int, device: torch.device) -> Run:
    """torch.jit.trace in half precision: FasterTransformer's own baseline."""
    copy = build_model(model.__dict__["_cfg"]).eval()
    apply_policy(copy, load_policy("float"))
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    example = torch.randn(batch, *shape_of(model)).to(device, dtype)
    copy = copy.to(device, dtype).requires_grad_(False)
    function = torch.jit.trace(lambda images: copy(images), example)  # of a module it asks every property
    return lambda images: function(images.to(dtype))


def eager(model: nn.Module, batch: int, dtype: torch.dtype, tf32: bool = False) -> Run:
    """timm's network in eager mode."""
    network = of_timm(model, dtype)

    def run(images: Tensor) -> object:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        return network(images.to(dtype))

    return run


def compiled(model: nn.Module, batch: int, prepare: Callable[[nn.Module], nn.Module] = lambda network: network) -> Run:
    """torch.compile of timm's in half precision, tuned as far as it goes; the graph is `milliseconds`' own."""
    torch._dynamo.reset()
    function = torch.compile(prepare(of_timm(model, torch.float16)), mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda images: function(images.half())


def by_torchao(network: nn.Module) -> nn.Module:
    """Int8 weights, activations quantized as they come: what torchao has for GPUs."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(network, Int8DynamicActivationInt8WeightConfig())
    return network


def of_timm(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """timm's network of the same sizes, random."""
    name = re.sub("_22kto1k_finetune|_finetune", "", model.__dict__["_cfg"].MODEL.NAME)
    name = name.replace("_patch4", "") if name.startswith("swinv2") else name
    return import_timm().create_model(name, pretrained=False).eval().to(next(model.parameters()).device, dtype)


def network_of(name: str, device: torch.device) -> nn.Module:
    """A random model with ranges under policy `cuda`, in evaluation mode."""
    torch.manual_seed(0)
    cfg = load_config(find_config(name))
    model = build_model(cfg).eval()
    apply_policy(model, load_policy("cuda"))
    model = model.to(device)
    calibrate(model, [torch.randn(2, *shape_of(model), device=device)], Method("max"))
    model.__dict__["_cfg"] = cfg
    return model


def shape_of(model: Any) -> tuple[int, int, int]:
    g = model.geometry
    return g.in_chans, g.image_size, g.image_size


@torch.inference_mode()
def milliseconds(run: Run, images: Tensor) -> float:
    """images [INPUTS, B, ...]: they take turns. On a GPU the median of replays of a graph, without the copy into it."""
    if not images.is_cuda:
        start = time.perf_counter()
        run(images[0])
        return 1000 * (time.perf_counter() - start)
    static = images[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static)
    times = []
    for number in range(WARM_UP + REPLAYS):
        static.copy_(images[number % len(images)])
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[WARM_UP:])


def plan(row: Row, model: nn.Module, machine: Machine | None) -> None:
    """What the int8 list moves and computes, and the sum of its floors."""
    program = fused_program(spec_for(model), row.batch, machine)
    row.bytes, row.operations = program.bytes_moved, program.operations
    if machine:
        row.floor_ms = sum(floor_of([one], machine).us for one in program.launches) / 1000


def single_launches(
    model: nn.Module, name: str, batch: int, device: torch.device, machine: Machine | None
) -> Iterator[str]:
    """Each launch alone, several in a graph: measured beside its floor. What one leaves in the cache helps the next."""
    network = packed(model, "int8")
    program = fused_program(network.spec, batch, machine)
    tensors = {key: tensor.to(device) for key, tensor in network.tensors.items()}
    bound = bind(program, tensors, network.scalars, device)
    yield f"## {name}, batch {batch}: each int8 launch alone\n"
    yield "| launch | op | µs | floor µs | measured / floor |\n|---|---|---:|---:|---:|"
    for launch, call in zip(program.launches, bound.calls, strict=True):
        repeats = 10 if device.type == "cuda" else 1

        def several(_: Tensor, call: Callable[[], None] = call, repeats: int = repeats) -> None:
            for _ in range(repeats):
                call()

        us = 1000 * milliseconds(several, torch.zeros(1, 1, device=device)) / repeats
        floor = floor_of([launch], machine).us if machine else None
        over = f"{floor:.1f} | {us / floor:.1f}" if floor else "- | -"
        yield f"| {launch.name} | {launch.op} | {us:.1f} | {over} |"
    yield ""


def heading(device: torch.device, machine: Machine | None) -> list[str]:
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "DRY RUN ON A CPU: no GPU was used, times mean nothing"
    peaks = f"floors by {machine.description}" if machine else "no GPU: no floors, no fusions"
    return [
        f"# CUDA engine: {where}",
        "",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {time.strftime('%F')}; {peaks}. ms: median of "
        f"{REPLAYS} replays of a CUDA graph, {INPUTS} batches of pictures in turn; random weights. int8, fp16: ours.",
        "",
    ]


def table(rows: list[Row]) -> Iterator[str]:
    """One line a network and batch."""
    names = list(dict.fromkeys(name for row in rows for name in row.ms))
    ratios = {"x trace": "trace fp16", "x own fp16": "fp16"}
    head = ["model", "batch", *(f"{name} ms" for name in names), "floor ms", "int8 / floor", "GB/s", "TOP/s"]
    head += ["x best torch fp16", *ratios]
    yield f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        if not row.ms:
            continue
        ours = row.ms.get("int8")
        torchs = [row.ms[name] for name in ("trace fp16", "eager fp16", "compile fp16") if name in row.ms]
        cells = [row.model, str(row.batch), *(shown(row.ms.get(name), 3) for name in names), shown(row.floor_ms, 3)]
        cells += [
            shown(ours / row.floor_ms if ours and row.floor_ms else None, 2),
            shown(row.bytes / ours / 1e6 if ours else None, 0),
            shown(row.operations / ours / 1e9 if ours else None, 1),
            shown(min(torchs) / ours if ours and torchs else None, 2),
        ]
        cells += [shown(row.ms[other] / ours if ours and other in row.ms else None, 2) for other in ratios.values()]
        yield f"| {' | '.join(cells)} |"


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
