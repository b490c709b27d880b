"""Time the CUDA engine on this GPU, beside torch and TensorRT with the same networks.

    python benchmarks/cuda_engine.py [--models ...] [--batch 32 1 8 64] [--seconds 480] [--output FOLDER]
    python benchmarks/cuda_engine.py --only-compile [--models ...] [--batch ...] [--seconds 480]

Random weights and ranges from noise cost as much as real ones. Times are the median over replays of a CUDA graph, with
pictures taking turns. Our kernels are compiled first, in as many processes as there are cores. Everything else runs in
another process, which is replaced after a candidate that hangs, dies, or corrupts the GPU: that candidate is listed as
failed. Our engine fails too if its logits are not its references': wrong kernels are not timed. Tiles are
those that `python tools/cuda/tune.py` wrote into the GPU's file. `--seconds` limits the whole run; jobs that were not
reached are listed. Writes cuda_engine.md after each result.

`--device cpu` is a dry run of this script with micro models: it measures no GPU. `trace` is torch.jit.trace of
Microsoft's network, FasterTransformer's own baseline. eager, compile and max-autotune (of torch.compile) run timm's
network; Swin V1 attends there by torch's scaled_dot_product_attention, which timm has off by default. TensorRT runs the
ONNX file of `export --for tensorrt`.
"""

import gc
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cuda_timing import REPLAYS, milliseconds
from pages import ROOT, join_cells, script_parser, versions_here
from torch import Tensor, nn

from swin_quant.backends.cuda.fusions import fused_program
from swin_quant.backends.cuda.gpu import Machine, capability_here, load_machine, name_here
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.network import Network, pack
from swin_quant.backends.cuda.program import NO_TILES, Bound, Launch, TileTable, bind, tiles_for
from swin_quant.backends.cuda.sessions import HostSession
from swin_quant.backends.cuda.spec import make_spec_from_config, spec_for
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.config.load import find_config, portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.distance import decibels, noise
from swin_quant.quant.policy import apply_policy, load_policy

sys.path.append(str(ROOT / "tools" / "cuda"))
from jobs import JobProcess  # noqa: E402

V1 = [f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")]
V1.append("swin_large_patch4_window7_224_22kto1k_finetune")
MODELS = (*V1, *(f"swinv2_{size}_patch4_window8_256" for size in ("tiny", "small", "base")))
QUICK = ("int8", "fp16", "trace fp16", "eager fp16", "compile fp16")
COSTLY = {"max-autotune fp16": "torch", "tensorrt int8": "tensorrt", "tensorrt fp16": "tensorrt"}  # and its package
ON_CPU = QUICK[:3]
TORCH = ("max-autotune fp16", "compile fp16", "trace fp16", "eager fp16")
USUAL, LONGEST = 60.0, 150.0  # seconds of a quick and of a costly job
COMPILING = 0.3  # the largest share of the time
LEAST = 5.0  # seconds; a job with less is not started
INPUTS = 4  # batches that take turns
CHECKED, MARGIN_DB = 2, 6.0  # pictures whose logits are compared, and the margin: see `Expected`

Run = Callable[[Tensor], object]


@dataclass(frozen=True)
class Place:
    """Where candidates run: device "cuda" or "cpu"."""

    device: str

    @property
    def machine(self) -> Machine | None:
        return None if self.device == "cpu" else load_machine(name_here())

    @property
    def tiles(self) -> TileTable:
        return self.machine.gpu.tiles if self.machine else NO_TILES


@dataclass(frozen=True)
class Job:
    """`candidate` is a name in `CONTENDERS`."""

    candidate: str
    model: str
    batch: int

    def __str__(self) -> str:
        return f"{self.candidate}, {self.model}, batch {self.batch}"


def main() -> None:
    end = time.monotonic()
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 1, 8, 64])
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only-compile", action="store_true", help="compile our kernels, and measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("out/cuda_engine"))
    args = parser.parse_args()
    end += args.seconds
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda_engine.py: torch finds no GPU here: nothing was measured")
    place = Place(args.device)
    notes = []
    if args.device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)  # else kernels are interpreted on the GPU's tensors
        share = 1.0 if args.only_compile else COMPILING
        notes.append(compile_all(args.models, args.batch, place, share * args.seconds))
        print(notes[0], flush=True)
    if args.only_compile:
        return
    jobs = list(dict.fromkeys(wanted(args.models, args.batch, args.device)))
    process = JobProcess(partial(measure, place))
    try:
        times = run(jobs, process, partial(write, args.output, place, notes), end)
    finally:
        process.close()
    print((args.output / "cuda_engine.md").read_text(encoding="utf-8"))
    if not any(job.candidate == "int8" for job in times):
        sys.exit("cuda_engine.py: our engine ran on none of them: see what failed")


def wanted(models: Sequence[str], batches: Sequence[int], device: str) -> Iterator[Job]:
    """All jobs, by importance: first the quick ones, which hold what README's goals compare."""
    quick = ON_CPU if device == "cpu" else QUICK
    yield from (Job(name, model, batch) for batch in batches for model in models for name in quick)
    if device == "cuda":
        there = [name for name, package in COSTLY.items() if importlib.util.find_spec(package)]
        yield from (Job(name, model, batch) for batch in batches for model in models for name in there)


def run(jobs: list[Job], process: Any, write: Callable[..., None], end: float) -> dict[Job, float]:
    """Run the jobs and return their milliseconds; a failing job is a line on the page."""
    times: dict[Job, float] = {}
    failed: dict[Job, str] = {}
    for number, job in enumerate(jobs):
        left = end - time.monotonic()
        if left < LEAST:
            write(times, failed, jobs[number:])
            break
        try:
            times[job], note = process.do(job, min(LONGEST if job.candidate in COSTLY else USUAL, left))
            print(f"{job}: {times[job]:.3f} ms {note}", flush=True)
        except SwinQuantError as error:
            failed[job] = str(error)
            print(f"{job}: {error}", flush=True)
        write(times, failed, jobs[number + 1 :])
    return times


def write(
    folder: Path, place: Place, notes: list[str], times: dict[Job, float], failed: dict[Job, str], left: list[Job]
) -> None:
    """Write the page: a line for each network and batch, what failed, and what was not reached."""
    on_gpu = place.device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "DRY RUN ON A CPU: no GPU was used, times mean nothing"
    tiles = "tiles as timed" if place.tiles else "tiles by default"
    about = f"ms: median of {REPLAYS} replays of a CUDA graph, {INPUTS} batches of pictures in turn; random weights."
    page = [f"# CUDA engine: {where}", "", f"{versions_here()}; {tiles}. {about} int8, fp16: ours.", *notes, ""]
    page += [*table(times), ""]
    page += ["## Failed", "", *(f"* {job}: {why}" for job, why in failed.items()), ""] if failed else []
    page += ["## Not reached in time", "", *(f"* {job}" for job in left), ""] if left else []
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(folder / "cuda_engine.md", "\n".join(page).encode())


def table(times: dict[Job, float]) -> Iterator[str]:
    names = list(dict.fromkeys(job.candidate for job in times))
    yield join_cells(["model", "batch", *(f"{name} ms" for name in names), "x best torch", "x trace"])
    yield "|---|" + "---:|" * (len(names) + 3)
    for model, batch in dict.fromkeys((job.model, job.batch) for job in times):
        ms = {job.candidate: taken for job, taken in times.items() if (job.model, job.batch) == (model, batch)}
        trace = f"{ms['trace fp16'] / ms['int8']:.2f}" if {"int8", "trace fp16"} <= set(ms) else "-"
        yield join_cells([model, batch, *(f"{ms[name]:.3f}" if name in ms else "-" for name in names), best(ms), trace])


def best(ms: dict[str, float]) -> str:
    """The speedup over the best of torch, and its name; nothing without torch.compile, the one to beat."""
    if "int8" not in ms:
        return "-"
    if not ms.keys() & set(TORCH[:2]):
        return "not measured"
    name = min((name for name in TORCH if name in ms), key=ms.__getitem__)
    return f"{ms[name] / ms['int8']:.2f} ({name.removesuffix(' fp16')})"


def compile_all(models: Sequence[str], batches: Sequence[int], place: Place, seconds: float) -> str:
    """Compile our kernels within some seconds; returns a note."""
    from crosscompile import compile_ahead

    def launches() -> Iterator[tuple[Launch, Tiles | None]]:
        machine, tiles = place.machine, place.tiles
        for name, batch in ((model, batch) for batch in batches for model in models):
            for precision in ("int8", "float"):
                spec = make_spec_from_config(load_config(find_config(name)), precision)
                for one in fused_program(spec, batch, machine).launches:
                    yield one, tiles_for(one, batch, tiles)

    started = time.monotonic()
    made = compile_ahead(launches(), capability_here(), seconds)
    took, said = time.monotonic() - started, "".join(f"; {one}" for one in made.refused[:5])
    return f"{made.done} kernels compiled in {took:.0f} s, {len(made.refused)} refused, {made.left} left{said}."


def measure(place: Place, job: Job) -> tuple[float, str]:
    """Build and time one candidate, on the CPU first and then moved. Returns milliseconds and a note."""
    try:
        run = CONTENDERS[job.candidate](job.model, job.batch, place)
        return milliseconds(run, torch.randn(INPUTS, job.batch, *input_shape(job.model), device=place.device))
    finally:
        run = None  # or an error's frame would keep it
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def engine(name: str, batch: int, place: Place, precision: str) -> Run:
    """Our engine: a program bound to memory; `milliseconds` captures the graph. SwinQuantError for wrong logits."""
    network, device = packed(name, precision), torch.device(place.device)
    tensors = {key: tensor.to(device) for key, tensor in network.tensors.items()}
    program = fused_program(network.spec, batch, place.machine)
    bound = bind(program, tensors, network.scalars, device, place.tiles)
    check_logits(bound, expected(name, precision))

    def run(images: Tensor) -> None:
        bound.images.copy_(images)
        bound()

    return run


@dataclass(frozen=True)
class Expected:
    """The references' logits for a few pictures, and the least SQNR in dB that right logits have to them.

    Two right results differ in how values on ties are rounded: at worst in everything. If both are equally far from the
    float network, with independent errors, they differ by 3 dB more than one from float. MARGIN is twice that. In
    random networks attention is even, and logits hardly depend on q and k: kernels are also tested one by one.
    """

    images: Tensor
    logits: Tensor
    floor_db: float


@cache
def expected(name: str, precision: str) -> Expected:
    network = packed(name, precision)
    images = torch.randn(CHECKED, *input_shape(name), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before, logits = calibrated(name, "cuda")(images), HostSession(network)(images)
    return Expected(images, logits, sqnr_db(before, logits) - MARGIN_DB)


def check_logits(bound: Bound, right: Expected) -> None:
    """SwinQuantError unless a program gives these logits, at any place in the batch."""
    which = torch.arange(len(bound.images)) % len(right.images)
    bound.images.copy_(right.images[which])
    bound()
    found = sqnr_db(right.logits[which], bound.logits.cpu())
    if not found >= right.floor_db:  # also true for NaN
        raise SwinQuantError(
            f"wrong logits, whose time is none: SQNR {found:.1f} dB to the references', {right.floor_db:.1f} at least"
        )


def sqnr_db(signal: Tensor, other: Tensor) -> float:
    return decibels(*noise(other.double(), signal.double()))


def traced(name: str, batch: int, place: Place) -> Run:
    """torch.jit.trace in half precision: FasterTransformer's own baseline."""
    model = build_model(load_config(find_config(name))).eval()
    apply_policy(model, load_policy("float"))
    dtype = torch.float16 if place.device == "cuda" else torch.bfloat16
    model = model.to(place.device, dtype).requires_grad_(False)
    example = torch.randn(batch, *input_shape(name)).to(place.device, dtype)
    # A module itself would be inspected
    function = torch.jit.trace(lambda images: model(images), example, check_trace=False)
    return lambda images: function(images.to(dtype))


def eager(name: str, batch: int, place: Place) -> Run:
    """timm's network in eager mode, in half precision."""
    network = build_half_timm(name, place)
    return lambda images: network(images.half())


def compiled(name: str, batch: int, place: Place, mode: str) -> Run:
    """torch.compile of timm's network in half precision; `milliseconds` captures the graph."""
    torch._dynamo.reset()
    function = torch.compile(build_half_timm(name, place), mode=mode, dynamic=False)
    return lambda images: function(images.half())


def by_tensorrt(name: str, batch: int, place: Place, precision: str) -> Run:
    """A TensorRT engine of our own ONNX export for this batch; the rest is float16."""
    from swin_quant.backends.onnx.export import OnnxOptions, export
    from swin_quant.backends.tensorrt import host
    from swin_quant.backends.tensorrt.build import BuildOptions, build, default_output, make_plan
    from swin_quant.backends.tensorrt.engine import open_session

    trt, gpu = host.tensorrt(), host.find_gpu()
    cfg, policy = load_config(find_config(name)), load_policy("tensorrt").to_dict() if precision == "int8" else None
    with TemporaryDirectory() as folder:
        model = calibrated(name, "tensorrt")
        card = RunCard(cfg.MODEL.NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict(), policy=policy)
        file = export(model, card, folder, OnnxOptions(precision, "tensorrt", batch=batch)).file
        plan = make_plan(open_artifact(file), BuildOptions(batch, batch, batch))
        made, _ = build(plan, default_output(file, gpu))
        return open_session(made, trt, gpu)


CONTENDERS: dict[str, Callable[[str, int, Place], Run]] = {
    "int8": partial(engine, precision="int8"),
    "fp16": partial(engine, precision="float"),
    "trace fp16": traced,
    "eager fp16": eager,
    "compile fp16": partial(compiled, mode="default"),
    "max-autotune fp16": partial(compiled, mode="max-autotune-no-cudagraphs"),
    "tensorrt int8": partial(by_tensorrt, precision="int8"),
    "tensorrt fp16": partial(by_tensorrt, precision="float"),
}


@cache
def packed(name: str, precision: str) -> Network:
    """Our network as the engine runs it. All are kept, a few GB: each comes again for every batch, and calibrating a
    large one on the CPU takes longer than timing it."""
    model = calibrated(name, "cuda")
    return pack(model, spec_for(model, precision))


@lru_cache(maxsize=1)
def calibrated(name: str, policy: str) -> Any:
    """A random model in evaluation mode with ranges from noise, under a policy; only the last one is kept."""
    torch.manual_seed(0)
    model = build_model(load_config(find_config(name))).eval()
    apply_policy(model, load_policy(policy))
    calibrate(model, [torch.randn(1, *input_shape(name))], Method("max"))
    return model


@lru_cache(maxsize=1)
def _timm(name: str) -> nn.Module:
    known = re.sub("_22kto1k_finetune|_finetune", "", load_config(find_config(name)).MODEL.NAME)
    known = known.replace("_patch4", "") if known.startswith("swinv2") else known
    timm = import_timm()
    timm.layers.set_fused_attn(True, experimental=True)
    return timm.create_model(known, pretrained=False).eval()


def build_half_timm(name: str, place: Place) -> nn.Module:
    """timm's network with the same sizes, random: a copy that may be changed."""
    return deepcopy(_timm(name)).to(place.device, torch.float16)


def input_shape(name: str) -> tuple[int, int, int]:
    """[3, side, side] of the model's pictures."""
    side = load_config(find_config(name)).DATA.IMG_SIZE
    return 3, side, side


if __name__ == "__main__":
    main()
