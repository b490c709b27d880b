"""The nodes of an ONNX file that break the rules of an NPU, which configs/npus.yaml holds with their sources."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swin_quant.backends.onnx_reader.checks import STANDARD, infer_shapes, label
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


@dataclass(frozen=True)
class Misfit:
    """A node that breaks a rule, and the rule in words."""

    node: str
    operator: str
    why: str

    def __str__(self) -> str:
        return f"{self.node} ({self.operator}): {self.why}"


def misfits(model: "ModelProto", target: str) -> list[Misfit]:
    """The nodes of an ONNX model that break the rules of a target, in the graph's order. SwinQuantError for a graph
    whose shapes contradict each other. Drops the data of large tensors from `model`."""
    rules, graph = NPUS[target], infer_shapes(model)
    shapes = {value.name: value.type.tensor_type.shape for value in (*graph.input, *graph.value_info, *graph.output)}
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    found = [
        Misfit(name, "input", "its shape is open: export with a fixed batch and size")
        for name in sorted({value.name for value in graph.input} - ranks.keys())
        if any(not size.HasField("dim_value") for size in shapes[name].dim)
    ]
    ranks |= {name: len(shape.dim) for name, shape in shapes.items()}
    for node in graph.node:
        if node.op_type in rules.lacks or node.domain not in STANDARD:
            found.append(Misfit(label(node), node.op_type, "the operator is not taken, or not rightly"))
        elif rules.takes is not None and node.op_type not in rules.takes:
            found.append(Misfit(label(node), node.op_type, "the operator is not in the target's list"))
        rank = max((ranks.get(name, 0) for name in (*node.input, *node.output)), default=0)
        if rank > rules.most_rank:
            found.append(Misfit(label(node), node.op_type, f"a tensor of rank {rank}, above {rules.most_rank}"))
    return found
