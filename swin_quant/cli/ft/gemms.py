"""swin-quant ft gemms."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.backends.fastertransformer.tuner import Tuned, TunedGemm
    from swin_quant.base.distributed import World

HELP = "List the int8 GEMMs of a model and batch for FasterTransformer, and what its tuner files say of them."
EXAMPLES = """examples:
  swin-quant ft gemms --cfg swin_tiny_patch4_window7_224 --batch 32
  swin-quant ft gemms out/my_calib.pth --batch 32 --tuned igemm_config.in                (which shapes are tuned)
  swin-quant ft gemms out/my_calib.pth --batch 32 --tuned a.in b.in --write igemm_config.in   (the fastest of both)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "of the model; or --cfg", head=False)
    parser.add_argument("--batch", type=whole, default=1, metavar="N", help="pictures (default 1)")
    parser.add_argument("--tuned", nargs="+", default=[], metavar="FILE", help="igemm_config.in files to look them up")
    parser.add_argument("--write", metavar="FILE", help="write the fastest entry of each shape in the --tuned files")


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.fastertransformer.tuner import fastest, gemm_shapes, read_tuned, write_tuned
    from swin_quant.models.geometry import geometry_of

    if args.write and not args.tuned:
        raise UsageError("--write needs --tuned FILE ...: algorithms come from swin_gemm on the target GPU")
    shapes = gemm_shapes(geometry_of(options.config_of(args)), args.batch)
    tuned = fastest([read_tuned(path) for path in args.tuned])
    if world.is_main:
        _print(shapes, {gemm: tuned.get(gemm.key) for gemm in shapes})
        if args.write:
            write_tuned(args.write, tuned.values())


def _print(shapes: list[TunedGemm], tuned: dict[TunedGemm, Tuned | None]) -> None:
    print(f"{'stage':>5}  {'layer':<13} {'m':>9} {'n':>6} {'k':>6}  algorithm")
    for gemm in shapes:
        found = tuned[gemm]
        note = f"{found.algo_id}, {found.exec_time:g} ms" if found else "not tuned"
        print(f"{gemm.stage:>5}  {gemm.layer:<13} {gemm.m:>9} {gemm.n:>6} {gemm.k:>6}  {note}")
    known = sum(entry is not None for entry in tuned.values())
    print(f"{len(shapes)} shapes, {known} tuned")
