"""List every quantizer node of a model: state, bits, granularity, range, shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import tell
from swin_quant.report.table import comma_separated, print_table, print_text, records

EXAMPLES = """examples:
  swin-quant nodes --cfg swin_tiny_patch4_window7_224 --policy ft-mode2
  swin-quant nodes out/my_calib.pth                                                     (policy of its run card)
  swin-quant nodes out/my_calib.pth --policy qdq --format csv > nodes.csv"""


@dataclass(frozen=True)
class NodesOptions:
    """The model whose nodes are listed, and the form of the list."""

    checkpoint: Annotated[str | None, Flag("calibrated checkpoint, to see its ranges", "CHECKPOINT", or_flag=True)] = (
        None
    )
    model: shared.ModelOptions = shared.ModelOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    format: Annotated[Literal["table", "csv"], Flag("how they are printed")] = "table"
    json: shared.Json = None
    device: shared.OnlyCpu = "cpu"


def run(options: NodesOptions) -> None:
    from swin_quant.loading import model_or_shapes
    from swin_quant.report.nodes import list_nodes, nodes_table

    checkpoint = shared.opened(options.checkpoint)
    cfg = shared.config_of(checkpoint, options.model)
    model = model_or_shapes(cfg, checkpoint, options.policy.one())
    rows = list_nodes(model, (1, *model.input_shape))
    table = nodes_table(rows)
    is_csv = options.format == "csv"
    show = partial(print_text, comma_separated(table.columns, rows)) if is_csv else partial(print_table, table)
    tell(options.json, show, records(table.columns, rows))
