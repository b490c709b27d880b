"""Export a calibrated checkpoint for FasterTransformer's CUDA ops and TensorRT plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from swin_quant.cli.flags import Flag, Rare
from swin_quant.verbs import export

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

EXAMPLES = """examples:
  python export_ft.py out/swin_tiny_patch4_window7_224_calib.pth --sm 80 --output out/ft
  swin-quant ft export theirs_calib.pth --policy ft-mode2 --sm 75 --check --output out/ft  (without run card)
  swin-quant ft export my.pth --precision float --float-type float16 --output out/ft"""


@dataclass(frozen=True, kw_only=True)
class FtExportOptions(export.TargetOptions):
    """The options of every target, with this one's words."""

    float_type: Annotated[Literal["float16", "float32"] | None, Flag("with --precision float (default float16)")] = None
    batch: Annotated[int | None, Flag("the most pictures that the op takes (default 128)", "N")] = None
    sm: Annotated[int | None, Flag("the GPU's compute capability, 80 for 8.0 (default 80)", "NN")] = None
    fix_gelu_bias: Annotated[bool, Rare("undo the op's misreading of more than 4096 biases (Swin-L)")] = False


def run(options: FtExportOptions, world: World) -> None:
    export.run(export.ExportOptions(backend="fastertransformer", **vars(options)), world)
