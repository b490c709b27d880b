"""Predict the gain of each optimization of the CUDA engine by its plan: writes docs/results/cuda_predictions.md.

    python benchmarks/cuda_predictions.py [--gpu h200]

Nothing is run: shapes and peaks are enough. Only a GPU shows the outcome.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pages import RESULTS, save, script_parser

from swin_quant.backends.cuda.choose_fusions import CACHE_BYTES_US, chosen, modelled_us
from swin_quant.backends.cuda.export import LARGEST_BATCH
from swin_quant.backends.cuda.floors import floor_of, gpu_of
from swin_quant.backends.cuda.fusions import ALL, APART, CHOICES, fused
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import (
    AS_EXECUTED,
    AS_FP16,
    FP8,
    FP16,
    INT8,
    PLANNED,
    CudaPlan,
    cuda_plan,
    spec_of_config,
)
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.sessions import sizes
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.operators.roofline import Machine, load_machine

PAGE = RESULTS / "cuda_predictions.md"
CASES = {
    ("Swin-T", 1): "swin_tiny_patch4_window7_224",
    ("Swin-T", 32): "swin_tiny_patch4_window7_224",
    ("Swin-L", 32): "swin_large_patch4_window7_224_22kto1k_finetune",
    ("SwinV2-T", 32): "swinv2_tiny_patch4_window8_256",
}
# The gap between kernels is 0.9 us, and 0.5 in a graph, where C++ queues the launches and the CPU keeps up: NVIDIA,
# "Getting Started with CUDA Graphs", 2019.
GRAPH_SAVES_US = 0.4
HALF = 2  # bytes
WINDOWS = 4  # windows a program
STREAM = re.compile(r"x\d+")  # the residual stream's buffers
OUTCOME = "not measured"
Us = Callable[["Case"], float]


@dataclass(frozen=True)
class Case:
    """A network and a batch on a machine."""

    model: str
    batch: int
    machine: Machine

    @cached_property
    def plan(self) -> CudaPlan:
        return cuda_plan(load_config(find_config(self.model)), self.machine, self.batch)

    @cached_property
    def spec(self) -> NetworkSpec:
        return spec_of_config(load_config(find_config(self.model)))

    def executed(self, spec: NetworkSpec | None = None, batch: int | None = None) -> tuple[Launch, ...]:
        program = program_of(spec or self.spec, batch or self.batch)
        return fused(program, chosen(program.launches, lambda launch: modelled_us(launch, self.machine))).launches

    def us(self, precision: str, choice: str) -> float:
        """Microseconds, as in `swin-quant cuda plan`."""
        return next(one.us for one in self.plan.fusions[precision] if one.name == choice)

    def floors(self, launches: Iterable[Launch], more: Callable[[Launch], int] = lambda launch: 0) -> float:
        """The sum of floors if each launch moves additional bytes."""
        found = [(floor_of([one], self.machine), more(one)) for one in launches]
        rate = self.machine.bandwidth_gbs * 1e3
        return sum(max(floor.compute_us, floor.launch_us, (floor.bytes + extra) / rate) for floor, extra in found)


@dataclass(frozen=True)
class Optimization:
    """`before` and `after`: microseconds without it and with it; None if the plan cannot tell."""

    title: str
    what: str
    before: Us | None = None
    after: Us | None = None


def unfilled(launch: Launch) -> int:
    """Bytes of position bias (negative) that rows of whole vectors add."""
    bias = launch.operands.get("position_bias")
    return 0 if bias is None else -(bias.nbytes - bias.nbytes // bias.shape[2] * bias.shape[1])


def mask(launch: Launch) -> int:
    """Bytes of a shift mask in memory."""
    windows = launch.arguments.get("windows")
    shifted = "position_bias" in launch.operands and windows.shift
    return windows.count * windows.tokens**2 * HALF if shifted else 0


def stream(launch: Launch) -> int:
    """Bytes of the residual stream, which float32 would double."""
    return sum(one.nbytes for one in launch.operands.values() if STREAM.fullmatch(one.name))


def by_windows(case: Case, windows: int) -> float:
    """All launches unfused, with attention at least as long as its programs take to read from the cache."""
    total = 0.0
    for launch in program_of(case.spec, case.batch).launches:
        us = floor_of([launch], case.machine).us
        if launch.op == "attention":
            qkv, out, bias = (launch.operands[word] for word in ("qkv", "out", "position_bias"))
            groups = -(-qkv.shape[0] // launch.arguments["windows"].tokens // windows)
            read = qkv.nbytes + out.nbytes + groups * bias.nbytes
            us = max(us, read / gpu_of(case.machine).sms / CACHE_BYTES_US)
        total += us
    return total


def one_more(case: Case) -> int:
    """The batch that the engine runs for one more picture."""
    return next(size for size in sizes(LARGEST_BATCH) if size > case.batch)


FUSED = {name: "what lies between stays on the chip" for name in CHOICES if name not in (APART, ALL)}
OPTIMIZATIONS = (
    Optimization(
        "INT8 in place of FP16, both fused as it pays",
        "half the bytes between launches, twice the peak; the residual stream stays half",
        lambda case: case.us(FP16, AS_FP16),
        lambda case: case.us(INT8, AS_EXECUTED),
    ),
    Optimization(
        "FP8 in place of INT8",
        "the same bytes; the peak of a data sheet",
        lambda case: case.us(INT8, AS_EXECUTED),
        lambda case: case.us(FP8, AS_EXECUTED),
    ),
    *(
        Optimization(
            f"fusion: {name}",
            what,
            lambda case: case.us(INT8, APART),
            lambda case, name=name: case.us(INT8, name),  # type: ignore[misc]
        )
        for name, what in FUSED.items()
    ),
    Optimization(
        "fusions: all that pay, as executed",
        "the sum is least by the model of backends/cuda/choose_fusions.py",
        lambda case: case.us(INT8, APART),
        lambda case: case.us(INT8, AS_EXECUTED),
    ),
    Optimization(
        "fusions of FP16, as executed",
        "the baseline is fused as well",
        lambda case: case.us(FP16, APART),
        lambda case: case.us(FP16, AS_FP16),
    ),
    Optimization(
        "one CUDA graph",
        f"{GRAPH_SAVES_US} µs from one kernel to the next; more where Python launches them one by one",
        lambda case: case.us(INT8, AS_EXECUTED) + GRAPH_SAVES_US * len(case.executed()),
        lambda case: case.us(INT8, AS_EXECUTED),
    ),
    Optimization(
        "residual stream in half in place of float32",
        "its bytes",
        lambda case: case.floors(case.executed(), stream),
        lambda case: case.floors(case.executed()),
    ),
    Optimization(
        "shift mask from coordinates",
        "a mask for each window of a map, in half",
        lambda case: case.floors(case.executed(), mask),
        lambda case: case.floors(case.executed()),
    ),
    Optimization(
        "rows of the position bias filled to vectors",
        "costs bytes; loads of 16 bytes, and registers, of which floors know nothing",
        lambda case: case.floors(case.executed(), unfilled),
        lambda case: case.floors(case.executed()),
    ),
    Optimization(
        f"{WINDOWS} windows a program of attention alone",
        "the position bias is read from the cache once for all of them; each launch apart",
        lambda case: by_windows(case, 1),
        lambda case: by_windows(case, WINDOWS),
    ),
    Optimization(
        "uint8 pictures",
        "bytes of pictures that the patch embedding reads; those of the copy in front of it besides",
        lambda case: case.floors(case.executed()),
        lambda case: case.floors(case.executed(replace(case.spec, pixels=True))),
    ),
    Optimization(
        "a batch larger by one, filled up to the next captured size",
        "costs what is not read; saves capturing every size",
        lambda case: case.floors(case.executed(batch=case.batch + 1)),
        lambda case: case.floors(case.executed(batch=one_more(case))),
    ),
    Optimization("tiles by `swin-quant cuda tune`", "the plan knows no tiles"),
    Optimization("Triton's `launch_pdl`", "a kernel begins before the one in front has ended; not taken yet"),
)


def cell(one: Optimization, case: Case) -> str:
    if one.before is None or one.after is None:
        return "-"
    before, after = one.before(case), one.after(case)
    return f"{before:.1f} → {after:.1f} ({after / before - 1:+.1%})"


def page(gpu: str) -> Iterator[str]:
    machine = load_machine(gpu)
    cases = {f"{name}, {batch}": Case(model, batch, machine) for (name, batch), model in CASES.items()}
    yield f"""# What each optimization of the CUDA engine should bring

`python benchmarks/cuda_predictions.py` writes this page: **{PLANNED}**. The least times of all launches in µs,
without an optimization and with it, by network and batch on {machine.description} ({machine.source});
[The plan](cuda_plan.md) computes them. A prediction holds if kernels come equally near to their floors. Fill in
*outcome* on a GPU: `benchmarks/cuda_engine.py` measures the sums and each launch, `swin-quant cuda tune` fused and
apart.
"""
    head = ["optimization", "what it saves", *cases, "outcome"]
    yield f"| {' | '.join(head)} |\n|---|---|{'---:|' * len(cases)}---|"
    for one in OPTIMIZATIONS:
        yield f"| {' | '.join([one.title, one.what, *(cell(one, case) for case in cases.values()), OUTCOME])} |"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--gpu", default="h200")
    args = parser.parse_args()
    save(PAGE, "\n".join(page(args.gpu)) + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()
