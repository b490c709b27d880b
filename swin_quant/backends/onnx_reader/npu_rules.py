"""The nodes of an ONNX file that break the rules of an NPU, which configs/npus.yaml holds with their sources."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swin_quant.backends.onnx_reader.checks import STANDARD, infer_shapes, label, shown
from swin_quant.base.files import configs_dir
from swin_quant.base.schema import checked
from swin_quant.base.yaml_file import read_yaml

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class NpuRules:
    """The rules of a target."""

    what: str
    most_rank: int
    takes: tuple[str, ...] | None
    lacks: tuple[str, ...]
    sources: tuple[str, ...]


_FILE = configs_dir() / "npus.yaml"
NPUS: dict[str, NpuRules] = checked(dict[str, NpuRules], read_yaml(_FILE, "table of NPUs"), str(_FILE))


def misfits(model: "ModelProto", target: str) -> list[str]:
    """The nodes of an ONNX model that break the rules of a target, each with the rule, in the graph's order.
    SwinQuantError for a graph whose shapes contradict each other."""
    rules, graph = NPUS[target], infer_shapes(model)
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    found = [
        f"{shown(value.name)} (input): its shape is open: export with a fixed batch and size"
        for value in graph.input
        if value.name not in ranks and not all(one.HasField("dim_value") for one in value.type.tensor_type.shape.dim)
    ]
    ranks |= {one.name: len(one.type.tensor_type.shape.dim) for one in (*graph.input, *graph.value_info, *graph.output)}
    for node in graph.node:
        where = f"{label(node)} ({shown(node.op_type)})"
        if node.op_type in rules.lacks or node.domain not in STANDARD:
            found.append(f"{where}: the operator is not taken, or not rightly")
        elif rules.takes is not None and node.op_type not in rules.takes:
            found.append(f"{where}: the operator is not in the target's list")
        rank = max((ranks.get(name, 0) for name in (*node.input, *node.output)), default=0)
        if rank > rules.most_rank:
            found.append(f"{where}: a tensor of rank {rank}, above {rules.most_rank}")
    return found
