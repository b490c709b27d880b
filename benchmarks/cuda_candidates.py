"""The candidates of `cuda_engine.py`, each built from a model's name and a batch, and timed in the process of
`JobProcess`.

Everything is built on the CPU and then moved. `trace` is torch.jit.trace of Microsoft's network, FasterTransformer's
own baseline: in a CUDA graph as all others, and by plain calls as in FasterTransformer. eager, compile, max-autotune
(of torch.compile) and torchao run timm's network; Swin V1 attends there by torch's scaled_dot_product_attention, which
timm has off by default (TIMM_FUSED_ATTN=2 has it on). torchao quantizes statically, as we do. TensorRT runs the ONNX
file of `export --for tensorrt`.
"""

import gc
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cuda_timing import Run, by_plain_calls, milliseconds, once
from cuda_tools import COPIES, filled, floor_us, microseconds
from torch import Tensor, nn

from swin_quant.backends.cuda.binding import Bound, bind
from swin_quant.backends.cuda.choose_fusions import fused_program
from swin_quant.backends.cuda.engine import machine_here
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.network import Network, pack
from swin_quant.backends.cuda.program import Launch, kernel_of
from swin_quant.backends.cuda.sessions import HostSession
from swin_quant.backends.cuda.spec_from_policy import spec_for
from swin_quant.backends.cuda.tuning import NO_TILES, TileTable, here, read_tiles
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.config.load import find_config, portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.operators.roofline import Machine, load_machine
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.distance import decibels, noise
from swin_quant.quant.policy import apply_policy, load_policy

INPUTS = 4
MOST_COPIES = 64  # most copies of a launch's operands
CHECKED, MARGIN_DB = 2, 6.0  # pictures whose logits are compared, and the margin: see `Expected`


@dataclass(frozen=True)
class Place:
    """Where candidates run: device "cuda" or "cpu"; the GPU whose peaks give fusions and floors (None: this one); a
    file of tiles."""

    device: str
    gpu: str | None = None
    tiles: Path | None = None

    @property
    def machine(self) -> Machine | None:
        if self.device == "cpu":
            return None
        return load_machine(self.gpu) if self.gpu else machine_here()

    @property
    def tuned(self) -> TileTable:
        return read_tiles(self.tiles, here()) if self.tiles and self.device == "cuda" else NO_TILES


@dataclass(frozen=True)
class Job:
    """`candidate` is a name in `CONTENDERS` or LAUNCHES."""

    candidate: str
    model: str
    batch: int


LAUNCHES = {"launches int8": "int8", "launches fp16": "float"}  # launches timed one by one, by precision
OURS = ("int8", "fp16", *LAUNCHES)
PLAIN = {"trace fp16": "trace fp16, plain calls"}  # also timed without a CUDA graph, under this name


@dataclass(frozen=True)
class Timed:
    """Milliseconds and a note, or lines of a table. `plain_ms`: milliseconds of plain calls, of candidates in PLAIN."""

    ms: float = 0.0
    note: str = ""
    lines: tuple[str, ...] = ()
    plain_ms: float | None = None


def measure(place: Place, job: Job) -> Timed:
    """Build and time one candidate."""
    try:
        if precision := LAUNCHES.get(job.candidate):
            return Timed(lines=tuple(single_launches(job.model, job.batch, place, precision)))
        run = CONTENDERS[job.candidate](job.model, job.batch, place)
        images = torch.randn(INPUTS, job.batch, *shape_of(job.model), device=place.device)
        timed = Timed(*milliseconds(run, images))
        return replace(timed, plain_ms=by_plain_calls(run, images)) if job.candidate in PLAIN else timed
    finally:
        run = images = None  # or an error's frame would keep them
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def engine(name: str, batch: int, place: Place, precision: str) -> Run:
    """Our engine: a program bound to memory; `milliseconds` captures the graph. SwinQuantError for wrong logits."""
    network, device = packed(name, precision), torch.device(place.device)
    tensors = {key: tensor.to(device) for key, tensor in network.tensors.items()}
    tuned = place.tuned
    bound = bind(fused_program(network.spec, batch, place.machine, tuned), tensors, network.scalars, device, tuned)
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
    images = torch.randn(CHECKED, *shape_of(name), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        of_float, logits = calibrated(name, "cuda")(images), HostSession(network)(images)
    return Expected(images, logits, sqnr_db(of_float, logits) - MARGIN_DB)


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
    example = torch.randn(batch, *shape_of(name)).to(place.device, dtype)
    # A module itself would be inspected
    function = torch.jit.trace(lambda images: model(images), example, check_trace=False)
    return lambda images: function(images.to(dtype))


def eager(name: str, batch: int, place: Place, dtype: torch.dtype, tf32: bool = False) -> Run:
    """timm's network in eager mode."""
    network = of_timm(name, place, dtype)

    def run(images: Tensor) -> object:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        return network(images.to(dtype))

    return run


def compiled(
    name: str,
    batch: int,
    place: Place,
    mode: str = "max-autotune-no-cudagraphs",
    dtype: torch.dtype = torch.float16,
    prepare: Callable[[nn.Module, Tensor], None] = lambda network, images: None,
) -> Run:
    """torch.compile of timm's network in half precision; `milliseconds` captures the graph."""
    torch._dynamo.reset()
    network = of_timm(name, place, dtype)
    prepare(network, torch.randn(batch, *shape_of(name)).to(place.device, dtype))
    function = torch.compile(network, mode=mode, dynamic=False)
    return lambda images: function(images.to(dtype))


@torch.inference_mode()
def by_torchao(network: nn.Module, images: Tensor, format: str) -> None:
    """Quantize all linears but the head to int8 (weights by row) or float8, with ranges of inputs from `images`."""
    from torchao.prototype.quantization.quant_api import Float8StaticActivationFloat8WeightConfig
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, PerTensor, quantize_

    amax: dict[str, Tensor] = {}

    def observe(_: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        amax[name] = given[0].abs().amax().float().view([1] * given[0].ndim)  # float8 wants the input's dimensions

    linears = {name: one for name, one in network.named_modules() if isinstance(one, nn.Linear) and "head" not in name}
    hooks = [one.register_forward_pre_hook(partial(observe, name=name)) for name, one in linears.items()]
    network(images)
    for hook in hooks:
        hook.remove()
    for name, largest in amax.items():
        if format == "int8":
            how = Int8StaticActivationInt8WeightConfig(largest / 127, granularity=[PerTensor(), PerRow()])
        else:
            how = Float8StaticActivationFloat8WeightConfig(act_quant_scale=largest / 448, granularity=PerTensor())
        quantize_(network, how, filter_fn=lambda _, at, name=name: at == name)


def by_tensorrt(name: str, batch: int, place: Place, precision: str) -> Run:
    """A TensorRT engine of our own ONNX export for this batch; the rest is float16."""
    from swin_quant.backends.onnx.export import OnnxOptions, export
    from swin_quant.backends.tensorrt import host
    from swin_quant.backends.tensorrt.build import build
    from swin_quant.backends.tensorrt.engine import open_session
    from swin_quant.backends.tensorrt.plan import BuildOptions, default_output, make_plan

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
    "eager fp16": partial(eager, dtype=torch.float16),
    "eager tf32": partial(eager, dtype=torch.float32, tf32=True),
    "eager fp32": partial(eager, dtype=torch.float32),
    "compile fp16": partial(compiled, mode="default"),
    "max-autotune fp16": compiled,
    "max-autotune bf16": partial(compiled, dtype=torch.bfloat16),
    "tensorrt int8": partial(by_tensorrt, precision="int8"),
    "tensorrt fp16": partial(by_tensorrt, precision="float"),
    "torchao int8": partial(compiled, prepare=partial(by_torchao, format="int8")),
    "torchao fp8": partial(compiled, prepare=partial(by_torchao, format="fp8")),
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
    calibrate(model, [torch.randn(1, *shape_of(name))], Method("max"))
    return model


@lru_cache(maxsize=1)
def _of_timm(name: str) -> nn.Module:
    known = re.sub("_22kto1k_finetune|_finetune", "", load_config(find_config(name)).MODEL.NAME)
    known = known.replace("_patch4", "") if known.startswith("swinv2") else known
    timm = import_timm()
    timm.layers.set_fused_attn(True, experimental=True)
    return timm.create_model(known, pretrained=False).eval()


def of_timm(name: str, place: Place, dtype: torch.dtype) -> nn.Module:
    """timm's network with the same sizes, random: a copy that may be changed."""
    return deepcopy(_of_timm(name)).to(place.device, dtype)


def shape_of(name: str) -> tuple[int, int, int]:
    """[3, side, side] of the model's pictures."""
    side = load_config(find_config(name)).DATA.IMG_SIZE
    return 3, side, side


def single_launches(name: str, batch: int, place: Place, precision: str) -> Iterator[str]:
    """Each launch by itself beside its floor, which counts all bytes from memory: no call finds its operands in a
    cache."""
    network, machine, tuned, device = packed(name, precision), place.machine, place.tuned, torch.device(place.device)
    yield f"## {name}, batch {batch}: each {'int8' if precision == 'int8' else 'fp16'} launch alone\n"
    yield "| launch | op | µs | floor µs | measured / floor | GB/s | TOP/s |\n|---|---|---:|---:|---:|---:|---:|"
    for launch in fused_program(network.spec, batch, machine, tuned).launches:
        try:
            us = launch_us(launch, tuned.tiles_for(launch, batch), device)
        except Exception as error:
            yield f"| {launch.name} | {launch.op} | {type(error).__name__}: {str(error)[:80]!r} | - | - | - | - |"
            continue
        floor = floor_us(launch, machine) if machine else None
        over = f"{floor:.1f} | {us / floor:.1f}" if floor else "- | -"
        rates = f"{launch.bytes_moved / us / 1e3:.0f} | {launch.operations / us / 1e6:.1f}"
        yield f"| {launch.name} | {launch.op} | {us:.1f} | {over} | {rates} |"
    yield ""


def launch_us(launch: Launch, tiles: Tiles | None, device: torch.device) -> float:
    """Microseconds of a launch on random operands, with copies that take turns."""
    copies = [kernel_of(launch, partial(filled, device=device)) for _ in range(copies_of(launch, device))]
    if device.type == "cuda":
        return microseconds([partial(one.launch, tiles) for one in copies])
    return 1000 * once(copies[0].reference)


def copies_of(launch: Launch, device: torch.device) -> int:
    """The number of copies that fill the GPU's cache twice: each has left the cache when its turn comes again."""
    if device.type == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(-(-2 * cache // max(launch.bytes_moved, 1)), COPIES), MOST_COPIES)
