"""Attacked parsers of graphs, exports and programs."""

import atexit
import functools
import hashlib
import importlib.util
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from parser_inputs import TESTS, Files, Parser, card, model, written

from swin_quant.backends.artifact import Artifact, get_policy_name
from swin_quant.backends.fastertransformer.emulator import load as load_emulator
from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.backends.fastertransformer.manifest import read_export
from swin_quant.backends.onnx_reader.file import open_onnx, read_model, verified, write_metadata
from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engines_for
from swin_quant.backends.saturation import caution, exact_kernels
from swin_quant.exported import find_checkpoint, labels_in, list_engine_names, read_config
from swin_quant.quant.policy import load_policy


def graphs() -> list[Files]:
    path = TESTS / "backends" / "conftest.py"
    spec = importlib.util.spec_from_file_location("graphs_of_tests", path)
    nets = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass needs the module there
    spec.loader.exec_module(nets)
    found = []
    plain = (nets.SmallNet(), nets.SmallNet(int8=False, opset=17, batch=2), nets.SmallNet(dtype=np.float16))
    for proto in (*(net.proto() for net in plain), branched(nets.SmallNet().proto())):
        write_metadata(proto, card(), "int8", {"batch": 2}, ["cat", "dog"])
        found.append({"x.onnx": proto.SerializeToString(), "x.data": bytes(4096)})
    proto = nets.SmallNet(opset=18).proto()
    for tensor in (each for each in proto.graph.initializer if each.name in ("fc1.weight", "head.weight")):
        tensor.data_location = 1
        for key, value in (("location", "x.data"), ("offset", "0"), ("length", str(len(tensor.raw_data)))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
        tensor.ClearField("raw_data")
    return [*found, {"x.onnx": proto.SerializeToString(), "x.data": np.ones(2048, np.float32).tobytes()}]


def branched(proto):
    """The logits quantized in both branches of an If."""
    from onnx import TensorProto, helper, numpy_helper

    proto.graph.node[-1].output[0] = "raw"
    scale = numpy_helper.from_array(np.float32(0.5), "branch.scale")
    branches = {}
    for name in ("then_branch", "else_branch"):
        pair = [helper.make_node("QuantizeLinear", ["raw", "branch.scale"], ["levels"], name=f"{name}.Q"),
                helper.make_node("DequantizeLinear", ["levels", "branch.scale"], [name], name=f"{name}.D")]  # fmt: skip
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        branches[name] = helper.make_graph(pair, name, [], [output], [scale])
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    proto.graph.node.append(helper.make_node("If", ["yes"], ["logits"], **branches))
    return proto


def open_graph(folder: Path) -> None:
    try:
        open_onnx(folder / "x.onnx")
    finally:  # read further even if it is no classifier
        found = read_model(folder / "x.onnx")
        inspect_model(found)


@functools.cache
def artifact(sm: int) -> tuple[Files, dict]:
    made: list[Artifact] = []
    files = written(
        "out", lambda folder: made.append(export(model(), card(), folder.parent, FasterTransformerOptions(sm=sm)))
    )
    names = {"x.safetensors": made[0].file.name, "x_manifest.json": f"{made[0].file.stem}_manifest.json"}
    manifest = json.loads(files[names["x_manifest.json"]])
    kept = {"x.safetensors": files[names["x.safetensors"]]}
    return kept | {"x_manifest.json": json.dumps(manifest | {"file": "x.safetensors"}).encode()}, made[0].card.artifact


def exports() -> list[Files]:
    return [artifact(80)[0], artifact(75)[0]]


def read_artifact(folder: Path) -> None:
    read_export(Artifact(folder / "x.safetensors", replace(card(), artifact=artifact(80)[1])))


def deployed() -> list[Files]:
    """Artifacts with their cards; most damage goes into the card, which has the hashes of the other files."""
    onnx = {"batch": 2, "target": "openvino", "float_type": "float32", "saturation_safe": ["openvino"]}
    graph, weights = graphs()[0]["x.onnx"], artifact(80)[0]
    made = []
    for files, backend, options in (({"x.onnx": graph}, "onnx", onnx), (weights, "fastertransformer", {"sm": 80})):
        main, *others = files
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        record = {"backend": backend, "file": main, "sha256": sums[main], "precision": "int8", "options": options,
                  "others": [{"file": name, "sha256": sums[name]} for name in others]}  # fmt: skip
        made.append({**files, "x.json": json.dumps(card(artifact=record).to_dict()).encode()})
    return made


def deploy(folder: Path) -> None:
    """Everything that is done with an artifact before an engine runs it."""
    opened = open_artifact(next(path for path in folder.iterdir() if path.suffix in (".onnx", ".safetensors")))
    read_config(opened)
    list_engine_names(opened, None)
    find_checkpoint(opened)
    for engine in engines_for(opened.record["backend"]):
        caution(engine, opened)
        exact_kernels(engine, opened)
    if opened.file.suffix == ".onnx":
        verified(opened)
        labels_in(opened)
        get_policy_name(opened)
    else:
        load_emulator(opened)


@functools.cache
def program(precision: str) -> Artifact:
    """An ExecuTorch program, in a folder that lasts as long as the process."""
    from swin_quant.backends.executorch import export as executorch

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    own = replace(card(), policy=load_policy("executorch").to_dict(), class_names=["cat", "dog", "fox"])
    return executorch.export(model(), own, folder.name, executorch.ExecutorchOptions(precision))


def programs() -> list[Files]:
    return [{"x.pte": program(precision).file.read_bytes()} for precision in ("int8", "float")]


def open_program(folder: Path) -> None:
    """All that is read of a program before it runs: it says itself which of the two cards it has."""
    from swin_quant.backends.executorch import export as executorch

    given = Artifact(folder / "x.pte", program("int8").card)
    executorch.read_labels(given)
    is_float = executorch.about(given).get("artifact.precision") == "float32"
    executorch.check_card(replace(given, card=program("float").card) if is_float else given)


has_executorch = importlib.util.find_spec("executorch") is not None
ARTIFACT_PARSERS = (
    Parser("ONNX", graphs, open_graph),
    Parser("FasterTransformer export", exports, read_artifact),
    Parser("artifact and its card", deployed, deploy),
    *([Parser("ExecuTorch program", programs, open_program)] if has_executorch else []),
)
