"""Time the CUDA engine's kernels on this GPU and keep the fastest tiles in a file beside the artifact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from swin_quant.cli import shared
from swin_quant.cli.flags import Flag

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

EXAMPLES = """examples:
  swin-quant cuda tune out/my_int8_cuda.safetensors
  swin-quant cuda tune out/my_int8_cuda.safetensors --batch 1 64 --seconds 600

The file is written after each kernel: a run that was ended, or had too little time, goes on when it is started again.
The engine takes the file where it lies beside its artifact and was made by the same kernels and compiler on such a GPU;
any other file is left aside with a warning. Without a file the engine runs with tiles that suit most GPUs."""


@dataclass(frozen=True)
class TuneOptions:
    """The artifact to tune, the batches, and the time for them."""

    artifact: Annotated[str, Flag("artifact that `export --for cuda` wrote", "ARTIFACT", place=True)]
    batch: Annotated[tuple[int, ...], Flag("default 1 8 32", "N")] = (1, 8, 32)
    seconds: Annotated[float, Flag("at most, about (default 300)", "S")] = 300.0
    to: Annotated[str | None, Flag("the file (default: beside the artifact, NAME.GPU.tiles.json)", "FILE")] = None


def run(options: TuneOptions, world: World) -> None:
    shared.one_process(world, "cuda tune")
    from swin_quant.backends.cuda.tune import tune

    report = tune(options.artifact, options.batch, options.to, options.seconds)
    now, before = sum(one["us"] or 0.0 for one in report.timed), sum(report.default_us)
    kernels = f"{len(report.timed)} kernels on {report.gpu}: {now:.0f} µs together, by default {before:.0f}"
    known = f"; {report.before} were timed before" if report.before else ""
    refused = f"; {report.refused} ran with no tiles, and are not chosen" if report.refused else ""
    left = f"; {report.left} were not reached: start it again, or give more --seconds" if report.left else ""
    print(f"{report.file}: {kernels}{known}{refused}{left}")
