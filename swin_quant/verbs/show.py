"""Show the built-in policies, the nodes of a model, an ONNX file, or a model's GEMMs for FasterTransformer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from swin_quant.backends.fastertransformer.tuner import fastest, gemm_shapes, read_tuned, write_tuned
from swin_quant.backends.onnx_reader.file import read_model
from swin_quant.backends.onnx_reader.npu_rules import NPUS, misfits
from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.backends.registry import engines_for
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.errors import SwinQuantError, UsageError, did_you_mean, offered
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.loading import ModelFile, model_or_shapes
from swin_quant.models.geometry import read_geometry
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant.policy import builtin_policies, load_policy
from swin_quant.report.graph import GraphReport, IntegerProducts, by_engine
from swin_quant.report.nodes import Nodes, PolicyList, list_nodes
from swin_quant.report.table import Column, Printed, ReportTable, field, records

EXAMPLES = """swin-quant show policies
swin-quant show out/my_calib.pth
swin-quant show --cfg swin_tiny_patch4_window7_224 --policy ft-mode2
swin-quant show out/my_calib.pth --policy qdq --json nodes.json
swin-quant show out/my_int8.onnx --engine onnxruntime --json report.json
swin-quant show some_swin_of_timm.onnx --for qnn
swin-quant show out/my_calib.pth --gemms 32 --tuned a.in b.in --write igemm_config.in"""
POLICIES = "policies"
_WITHOUT = ("replace_head", "random_weights", "device")  # only names and shapes are asked of the model


# Rows: a GEMM, and the algorithm of FasterTransformer's tuner with its time, if one is known.
_GEMMS: tuple[Column[dict[str, Any]], ...] = (
    *(Column(name, name, field("gemm", name)) for name in ("stage", "layer", "m", "n", "k")),
    Column("algorithm", "algorithm", field("tuned", "algo_id"), blank="not tuned"),
    Column("ms", "ms", field("tuned", "exec_time"), "{:g}", may_lack=True),
)


@dataclass(frozen=True)
class Gemms(Printed):
    """The int8 GEMMs of a model and batch, with the entries of tuner files."""

    rows: Sequence[dict[str, Any]]

    def tables(self) -> list[ReportTable[dict[str, Any]]]:
        remark = f"{len(self.rows)} shapes, {sum(row['tuned'] is not None for row in self.rows)} tuned"
        return [ReportTable(_GEMMS, self.rows, [remark])]

    def to_json(self) -> list[dict[str, Any]]:
        """A record for each GEMM."""
        return records(_GEMMS, self.rows)


def show(
    subject: Annotated[str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",), _WITHOUT)],
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    engine: str | None = None,
    npu: Annotated[str | None, Parameter(name="--for")] = None,
    gemms: int | None = None,
    tuned: tuple[str, ...] = (),
    write: str | Path | None = None,
) -> PolicyList | Nodes | GraphReport | Gemms:
    """Show the built-in policies, every quantizer node of a model, or what an ONNX file runs in int8.

    A CHECKPOINT or --cfg gives the nodes: state, bits, granularity, range, shape. The word "policies" gives the purpose
    of each built-in policy and the backends that take it; a policy of your own is a YAML file like those in
    configs/policies. A file that ends in .onnx, of whatever tool, gives its int8 products, what stays float, and how
    many run in int8 on each installed engine.

    Args:
        subject: A checkpoint, an ONNX file, or "policies".
        policy: Default: the run card's.
        engine: ONNX: count what this engine alone runs in int8 (default: all)
        npu: ONNX: list the nodes that an NPU does not take, by its maker's rules: qnn, openvino-npu (docs/devices.md)
        gemms: instead of nodes, the int8 GEMMs of a batch of this many pictures, for FasterTransformer
        tuned: with --gemms: igemm_config.in files to look them up
        write: with --gemms: write the fastest entry of each shape in the --tuned files to this file

    Returns:
        What was found; printed, it is a table.

    Raises:
        SwinQuantError: The file cannot be read.
        UsageError: Options that do not fit the subject.
    """
    file = subject if isinstance(subject, ModelFile) else ModelFile(str(subject))
    name = str(file.checkpoint)
    is_list, is_graph, meant = name == POLICIES, name.endswith(".onnx"), did_you_mean(name, [POLICIES])
    if (is_list or is_graph) and (policy is not None or gemms or file != ModelFile(file.checkpoint)):
        raise UsageError(f"{name}: has no nodes: leave the options of models and policies out")
    if (engine or npu) and not is_graph:
        raise UsageError(f"{'‹engine›' if engine else '‹npu›'}: is for ONNX files")
    if (tuned or write) and gemms is None:
        raise UsageError("‹tuned› and ‹write›: are for ‹gemms›")
    if meant and not is_list and not Path(name).exists():
        raise UsageError(f"{name}: no such checkpoint{meant}")
    if is_list:
        return PolicyList([load_policy(name) for name in builtin_policies()])
    if is_graph:
        return _inspect(Path(name), engine, npu)
    if gemms is not None:
        if policy is not None:
            raise UsageError("‹policy›: shapes of GEMMs depend on none: leave it out")
        return _gemms(file, gemms, tuned, write)
    chosen = one_policy(policy)
    model = model_or_shapes(file.config(), file.opened, chosen)
    return Nodes(list_nodes(model, (1, *model.input_shape)))


def _inspect(file: Path, engine: str | None, npu: str | None) -> GraphReport:
    if npu and npu not in NPUS:
        raise UsageError(f"‹npu› {npu}: no rules are known{offered(npu, NPUS)}")
    if engine and engine not in (known := engines_for("onnx")):
        raise UsageError(f"‹engine› {engine}: runs no ONNX file{offered(engine, known)}")
    try:
        with reading(str(file), "ONNX file"):
            model = read_model(file)
            report = inspect_model(model)
            unfit = misfits(model, npu) if npu else []
    except SwinQuantError as error:
        named = str(error).startswith(str(file))
        raise error if named else SwinQuantError(f"{file}: {error}") from error
    functions = {(one.domain, one.name) for one in model.functions}
    if calls := Counter(node.op_type for node in model.graph.node if (node.domain, node.op_type) in functions):
        shown = ", ".join(f"{name} {count}" for name, count in calls.items())
        log.info("operators: %s: reported as their plain nodes; a compiled library runs each as one", shown)
    counts: Mapping[str, IntegerProducts] = {}
    try:
        counts = {} if npu else by_engine(file, (engine,) if engine else ())
    except SwinQuantError as error:  # another tool's file, which our engines do not take
        log.warning("products were not counted on engines: %s", error)
    return GraphReport(file, report, counts, npu, unfit)


def _gemms(file: ModelFile, batch: int, tuned: Sequence[str], write: str | Path | None) -> Gemms:
    if write and not tuned:
        raise UsageError("‹write› needs ‹tuned› FILE ...: algorithms come from swin_gemm on the target GPU")
    known = fastest([read_tuned(path) for path in tuned])
    shapes = gemm_shapes(read_geometry(file.config()), batch)
    if write:
        write_tuned(write, known.values())
    return Gemms([{"gemm": gemm, "tuned": known.get(gemm.key)} for gemm in shapes])
