"""List the int8 GEMMs of a model and batch for FasterTransformer, with the entries of its tuner files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swin_quant.base.errors import UsageError
from swin_quant.cli.flags import Flag
from swin_quant.cli.shared import ModelOptions, config_of, opened

EXAMPLES = """examples:
  swin-quant ft gemms --cfg swin_tiny_patch4_window7_224 --batch 32
  swin-quant ft gemms out/my_calib.pth --batch 32 --tuned igemm_config.in                (which shapes are tuned)
  swin-quant ft gemms out/my_calib.pth --batch 32 --tuned a.in b.in --write igemm_config.in   (the fastest of both)"""


@dataclass(frozen=True)
class GemmsOptions:
    """The model and batch whose GEMMs are listed, and the tuner files to look them up in."""

    checkpoint: Annotated[str | None, Flag("checkpoint of the model; or --cfg", "CHECKPOINT", or_flag=True)] = None
    model: ModelOptions = ModelOptions()
    batch: Annotated[int, Flag("pictures", "N")] = 1
    tuned: Annotated[tuple[str, ...], Flag("igemm_config.in files to look them up", "FILE")] = ()
    write: Annotated[str | None, Flag("write the fastest entry of each shape in the --tuned files", "FILE")] = None


def run(options: GemmsOptions) -> None:
    from swin_quant.backends.fastertransformer.tuner import fastest, gemm_shapes, read_tuned, write_tuned
    from swin_quant.models.geometry import geometry_of

    if options.write and not options.tuned:
        raise UsageError("--write needs --tuned FILE ...: algorithms come from swin_gemm on the target GPU")
    cfg = config_of(opened(options.checkpoint), options.model, DATA__BATCH_SIZE=options.batch)
    shapes = gemm_shapes(geometry_of(cfg), options.batch)
    tuned = fastest([read_tuned(path) for path in options.tuned])
    print(f"{'stage':>5}  {'layer':<13} {'m':>9} {'n':>6} {'k':>6}  algorithm")
    for gemm in shapes:
        entry = tuned.get(gemm.key)
        note = f"{entry.algo_id}, {entry.exec_time:g} ms" if entry else "not tuned"
        print(f"{gemm.stage:>5}  {gemm.layer:<13} {gemm.m:>9} {gemm.n:>6} {gemm.k:>6}  {note}")
    print(f"{len(shapes)} shapes, {sum(gemm.key in tuned for gemm in shapes)} tuned")
    if options.write:
        write_tuned(options.write, tuned.values())
