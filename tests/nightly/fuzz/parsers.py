"""The attacked parsers: valid files of each, made here, and a function that reads them as the tool does.

A case is a folder of files. `parse` may succeed or raise a SwinQuantError; everything else is a fault.
"""

import atexit
import contextlib
import csv
import functools
import hashlib
import importlib.util
import io
import json
import pickle
import random
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save as save_tensors
from torch import nn

from swin_quant.backends.artifact import Artifact, get_policy_name
from swin_quant.backends.fastertransformer.emulator import load as load_emulator
from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.backends.fastertransformer.manifest import read_export
from swin_quant.backends.fastertransformer.tuner import Tuned, read_tuned, write_tuned
from swin_quant.backends.onnx_reader.file import open_onnx, read_model, verified, write_metadata
from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engines_for
from swin_quant.backends.saturation import caution, exact_kernels
from swin_quant.base.files import configs_dir, write_json
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.checkpoint import load_calibrated, load_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.checkpoint.mindspore import encode_ckpt
from swin_quant.checkpoint.names import to_mindspore
from swin_quant.checkpoint.opened import open_checkpoint
from swin_quant.config import from_dict, load_config, to_dict
from swin_quant.data.class_names import list_wnids
from swin_quant.data.pictures import UnreadablePicture, decode
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sources import open_pictures
from swin_quant.data.zip import ZipPictures
from swin_quant.exported import find_checkpoint, labels_in, list_engine_names, read_config
from swin_quant.models import build_model
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.observers import BINS
from swin_quant.quant.passes.recipe import load_passes
from swin_quant.quant.policy import apply_policy, load_policy, policy_from_dict, settings_for
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.ranges import search_range
from swin_quant.quant.statistics import Statistics, join_sides
from swin_quant.quant.statistics_file import read_statistics, statistics_bytes
from swin_quant.report import FORMATS
from swin_quant.score.alignment import read_dump
from swin_quant.score.scoring import class_names
from swin_quant.train.outdir import STEP_COLUMNS, STEPS, Table, open_folder
from swin_quant.train.recipe import Recipe, load_recipe
from swin_quant.train.snapshot import FORMAT, Position, TrainingState, check_snapshot
from swin_quant.verbs.quantize_steps import Steps
from swin_quant.verbs.report import report

Files = dict[str, bytes]
TESTS = Path(__file__).parents[2]
MICRO = {"EMBED_DIM": 32, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2}
NODES = ["layers.0.a_quantizer", "layers.0.b_quantizer"]
has_executorch = importlib.util.find_spec("executorch") is not None
has_pyarrow = importlib.util.find_spec("pyarrow") is not None
DATASET = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "0" * 64}


@dataclass(frozen=True)
class Parser:
    """`valid()`: folders that the parser accepts, as {name: bytes}; `parse(folder)`: reads a folder as the tool does.

    `refuses`: False if damage is only warned of.
    """

    name: str
    valid: Callable[[], list[Files]]
    parse: Callable[[Path], object]
    refuses: bool = True


@functools.cache
def config():
    keys = {f"MODEL.SWIN.{key}": value for key, value in MICRO.items()}
    return load_config(
        configs_dir() / "demo" / "swin_digits.yaml",
        overrides={"DATA.IMG_SIZE": 8, "MODEL.NUM_CLASSES": 3, "MODEL.NAME": "micro", **keys},
    )


@functools.cache
def model() -> nn.Module:
    """A calibrated micro model."""
    torch.manual_seed(0)
    made = build_model(config()).eval()
    apply_policy(made, load_policy("ft-mode1"))
    calibrate(made, [torch.randn(4, 3, 8, 8)])
    return made


@functools.cache
def plain_model() -> nn.Module:
    return build_model(config())


def encoded(content: object, save: Callable = torch.save, **options) -> bytes:
    buffer = io.BytesIO()
    save(content, buffer, **options)
    return buffer.getvalue()


# Checkpoints


def pickled(legacy: bool) -> list[Files]:
    state = model().state_dict()
    training = {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "epoch": 3, "config": {"A": (1, "x")}}
    contents = [{"model": state, **training}, state, {key: value.half() for key, value in state.items()}]
    return [{"x.pth": encoded(content, _use_new_zipfile_serialization=not legacy)} for content in contents]


def safe_tensors() -> list[Files]:
    state = {key: value.contiguous() for key, value in model().state_dict().items()}
    return [{"x.safetensors": save_tensors(kept)} for kept in (state, {key: v.double() for key, v in state.items()})]


def ckpts() -> list[Files]:
    state = {key: value for key, value in model().state_dict().items() if not key.endswith(("_amax", "index", "mask"))}
    kinds = (torch.float32, torch.float16)
    return [{"x.ckpt": encode_ckpt({key: x.to(kind) for key, x in to_mindspore(state).items()})} for kind in kinds]


def dumps() -> list[Files]:
    arrays = {"images": np.zeros((1, 3, 8, 8), np.float32), "forward/layers.0": np.eye(3), "labels": np.array([1])}
    return [{"x.npz": encoded(arrays, lambda arrays, file, save=save: save(file, **arrays))}
            for save in (np.savez, np.savez_compressed)]  # fmt: skip


def load(name: str, folder: Path) -> None:
    load_calibrated(model(), folder / name)


def nameless() -> list[Files]:
    """Weights without a card or a name: keys and shapes tell what they are."""
    files = [configs_dir() / "demo" / f"{kind}_digits.yaml" for kind in ("swin", "swinv2")]
    keys = {"NUM_HEADS": [1, 2], "DEPTHS": [2, 2], "EMBED_DIM": 8}
    small = [{f"MODEL.{kind}.{key}": value for key, value in keys.items()} for kind in ("SWIN", "SWINV2")]
    small[1]["MODEL.SWINV2.PRETRAINED_WINDOW_SIZES"] = [0, 6]
    built = [build_model(load_config(file, overrides=each)) for file, each in zip(files, small, strict=True)]
    states = [{key: value for key, value in made.state_dict().items() if not key.endswith("_amax")} for made in built]
    return [{"x.pth": encoded(state)} for state in states]


def repositories() -> list[Files]:
    """Snapshots of timm's and transformers' repositories."""
    tables = ("relative_position_index", "attn_mask", "_amax")
    weights = save_tensors({key: value for key, value in model().state_dict().items() if not key.endswith(tables)})
    mean = [0.5, 0.5, 0.5]
    pretrained = {"input_size": [3, 8, 8], "crop_pct": 0.9, "interpolation": "bicubic", "mean": mean, "std": mean}
    described = (
        {"config.json": {"architecture": "swin_tiny", "model_args": {"img_size": 8}, "pretrained_cfg": pretrained}},
        {
            "config.json": {"model_type": "swin", "image_size": 8, "window_size": 2},
            "preprocessor_config.json": {"size": {"height": 8, "width": 8}, "resample": 3, "image_mean": mean},
        },
    )
    return [
        {"model.safetensors": weights, **{name: json.dumps(text).encode() for name, text in each.items()}}
        for each in described
    ]


def identify(name: str, folder: Path) -> None:
    checkpoint = open_checkpoint(folder / name)
    load_float(build_model(config_for(checkpoint)), checkpoint)


# Texts


def card(**more) -> RunCard:
    return RunCard(
        "micro",
        to_dict(config()),
        Preprocess.from_config(config()).to_dict(),
        source={"file": "x.pth", "sha256": "1" * 64, "format": "pth", "path": "../x.pth"},
        policy=load_policy("ft-mode1").to_dict(),
        **more,
    )


def measured(precision: str, engine: str = "torch", policy: str | None = None) -> dict:
    return asdict(
        Result(engine, precision, policy, DATASET, 5000, 70.5, 98.0, 0.9, 32, "cpu", agreement=99.0, sqnr_db=35.6)
    )


def cards() -> list[Files]:
    stored = [file.read_bytes() for file in sorted((TESTS / "cards").glob("*.json"))]
    own = card(results=[measured("float32"), measured("int8", "torch fake-quant", "ft-mode1")])
    return [{"x.json": data} for data in (json.dumps(own.to_dict()).encode(), *stored)]


def read_card(folder: Path) -> None:
    read = RunCard.read(folder / "x.json")
    read.measured()
    from_dict(read.config, "config")
    Preprocess.from_dict(read.preprocess)
    if read.policy:
        policy_from_dict(read.policy, "policy")


def reports() -> list[Files]:
    files = [found["x.json"] for found in cards()]
    return [{"a.json": one, "b.json": other} for one, other in zip(files, [*files[1:], files[0]], strict=True)]


def make_report(folder: Path) -> None:
    table = report((str(folder),))
    for form in FORMATS:
        table.text(form)


def shipped(kind: str) -> list[Files]:
    """The YAML files of one of our folders, unchanged and in flow style."""
    texts = [file.read_text() for file in sorted((configs_dir() / kind).glob("[!_]*.yaml"))]
    flow = [yaml.safe_dump(yaml.safe_load(text), default_flow_style=True, width=1000) for text in texts]
    return [{"x.yaml": text.encode()} for text in (*texts, *flow)]


def configs() -> list[Files]:
    base = b"MODEL: {TYPE: swin, NAME: base, SWIN: {WINDOW_SIZE: 7}}\nDATA:\n  IMG_SIZE: 224\n"
    own = b"BASE: ['b.yaml']\nMODEL:\n  NUM_CLASSES: 10\n  SWIN:\n    DEPTHS: [2, 2, 6, 2]\nTRAIN: {BASE_LR: 1e-4}\n"
    flow = (
        b'{"BASE": "b.yaml", "MODEL": {"SWIN": {"DEPTHS": [2], "NUM_HEADS": [3]}}, "AUG": {"CUTMIX_MINMAX": [0.2, 1]}}'
    )
    return [{"b.yaml": base, "x.yaml": text} for text in (own, flow)]


def rules(folder: Path) -> None:
    settings_for(model(), load_policy(str(folder / "x.yaml")))


def step_records() -> list[Files]:
    one = {"words": ["calibrate", "x.pth"], "inputs": {"the policy": "0"}, "file": "x_calib.pth", "sha256": "0"}
    return [_written("x.steps", functools.partial(write_json, value=some)) for some in ([one], [one, one])]


def tuner_files() -> list[Files]:
    entries = [Tuned(1, 128 * i, 64 * i, 32, 21, 0, 20, 0, 0, 0, 0, 15, 0.01 * i) for i in range(1, 6)]
    return [_written("x.in", functools.partial(write_tuned, entries=found)) for found in (entries, entries[::-1])]


def _written(name: str, write: Callable[[Path], object]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, name))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def step_tables() -> list[Files]:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(
        [STEP_COLUMNS, *([i, 1, i, 0.5, 1e-3, "", 2, 9] for i in range(9))]
    )
    return [{STEPS: buffer.getvalue().encode()}, {STEPS: (",".join(STEP_COLUMNS) + "\n").encode()}]


def resume_table(folder: Path) -> None:
    Table(folder / STEPS, STEP_COLUMNS, 5).add({"total": 6})


def statistics() -> list[Files]:
    rng = np.random.default_rng(0)
    rows = {name: Statistics(rng.integers(0, 9, BINS), 0.5, 0.5 * BINS) for name in NODES}
    sparse = {name: Statistics(np.eye(1, BINS, dtype=np.int64)[0], 2.0**-100, 0.0) for name in NODES}
    return [
        {"x.stats.npz": statistics_bytes({name: join_sides(below[name], above[name]) for name in NODES})}
        for below, above in ((rows, sparse), (sparse, rows), (sparse, sparse))
    ]


def search_ranges(folder: Path) -> None:
    """Search ranges, as after reading statistics."""
    for found in read_statistics(folder / "x.stats.npz", NODES).values():
        for name in RANGE_METHODS:
            search_range(name, found, 8)


# Pictures


def picture(kind: str, mode: str, seed: int = 0, **options) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (24, 32, 4), dtype=np.uint8)
    grey = mode.startswith("I;16")
    image = Image.fromarray(noise[..., 0].astype(np.uint16) * 257) if grey else Image.fromarray(noise).convert(mode)
    return encoded(kind, lambda kind, file, **more: image.save(file, kind, **more), **options)


def pictures(*kinds: tuple) -> list[Files]:
    return [{"x": picture(kind, mode, **(more[0] if more else {}))} for kind, mode, *more in kinds]


PNGS = [("PNG", "RGB"), ("PNG", "I;16"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "1")]
JPEGS = [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("JPEG", "RGB", {"progressive": True})]
OTHERS = [("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB"), ("TIFF", "L", {"compression": "tiff_lzw"}), ("TIFF", "I;16"),
          ("WEBP", "RGB"), ("PPM", "RGB"), ("PPM", "L")]  # fmt: skip
RARE = [("AVIF", "RGB"), ("TGA", "RGB"), ("TGA", "RGBA", {"rle": True}),
        ("PCX", "P"), ("QOI", "RGB"), ("SGI", "RGB", {"rle": True}), ("XBM", "1")]  # fmt: skip


def see(folder: Path) -> None:
    decode((folder / "x").read_bytes(), "x")


def archives() -> list[Files]:
    found = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for number in range(4):
                archive.writestr(f"c{number % 3}/{number}.png", picture("PNG", "RGB", number))
        lines = "".join(f"c{number % 3}/{number}.png\t{number % 3}\n" for number in range(4))
        found.append({"val.zip": buffer.getvalue(), "val_map.txt": lines.encode(), "classes.txt": b"cat\ndog\nfox\n"})
    return found


def read_archive(folder: Path) -> None:
    opened = ZipPictures(folder, "val", 3)
    for index in range(min(len(opened), 8)):
        with contextlib.suppress(UnreadablePicture):
            opened.read(index)


def tables() -> list[Files]:
    files = {f"c{number}.png": picture("PNG", "RGB", number) for number in range(3)}
    texts = ("path,label\nc0.png,0\nc1.png,2\n", "c0.png\tcat\nc1.png\tdog\nc2.png\tfox\n",
             '"label";"split";"file_name"\r\n0;val;"c2.png"\r\n1;train;c1.png\r\n')  # fmt: skip
    return [{"val.csv": text.encode(), **files} for text in texts]


def shards() -> list[Files]:
    made = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            for number in range(3):
                key = ("" if form == tarfile.USTAR_FORMAT else "x" * 120 + "/") + f"{number:04d}"
                for name, data in ((f"{key}.png", picture("PNG", "L", number)), (f"{key}.cls", str(number).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        made.append({"val-0000.tar": buffer.getvalue(), "classes.txt": b"cat\ndog\nfox\n"})
    return made


def cifars() -> list[Files]:
    ten = b"".join(bytes([label]) + bytes(range(256)) * 12 for label in (0, 9, 3))
    hundred = b"".join(bytes([1, label]) + bytes(range(256)) * 12 for label in (0, 99))
    return [{"test_batch.bin": ten, "batches.meta.txt": b"a\n" * 10}, {"test.bin": hundred}]


def pickled_cifars() -> list[Files]:
    batch = {b"labels": [0, 9], b"data": np.arange(6144, dtype=np.uint8).reshape(2, 3072)}
    meta = pickle.dumps({"label_names": [f"c{number}" for number in range(10)]}, protocol=2)
    return [{"test_batch": pickle.dumps(batch, protocol=version), "batches.meta": meta} for version in (2, 4)]


def parquets() -> list[Files]:
    import pyarrow
    import pyarrow.parquet

    note = json.dumps({"info": {"features": {"label": {"names": ["cat", "dog", "fox"]}}}})
    stored = pyarrow.array([picture("PNG", "L", number) for number in range(3)])
    by_number = {"image": stored, "label": pyarrow.array(["cat", "dog", "fox"]).dictionary_encode()}
    by_prefix = {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}}
    plain = pyarrow.table({"image": stored, "label": [0, 1, 2]})
    images = [{"bytes": picture("PNG", "L", number), "path": f"{number}.png"} for number in range(3)]
    table = pyarrow.table({"image": images, "label": [0, 1, 2]}).replace_schema_metadata({"huggingface": note})
    return [
        {"val.parquet": encoded(content, pyarrow.parquet.write_table, row_group_size=2, **how)}
        for content, how in (
            (table, {"compression": "none"}), (table, {"compression": "snappy"}), (plain, by_prefix),
            (pyarrow.table(by_number), {"compression": "zstd", "data_page_version": "2.0"}),
        )
    ]  # fmt: skip


def validations() -> list[Files]:
    """Labels of the flat validation folder, in each form; one picture, since only labels are read."""
    jpeg = {"ILSVRC2012_val_00000001.JPEG": picture("JPEG", "L")}
    wnids = list_wnids(1000)
    ids = "\n".join(f"{wnid} {number} name" for number, wnid in enumerate(reversed(wnids), 1)).encode()
    texts = (
        {"val.txt": b"ILSVRC2012_val_00000001.JPEG 7\n", "synset_words.txt": "\n".join(wnids).encode()},
        {"LOC_val_solution.csv": f"ImageId,PredictionString\nILSVRC2012_val_00000001,{wnids[3]} 1 2 3 4\n".encode()},
        {"imagenet_2012_validation_synset_labels.txt": wnids[5].encode()},
        {"ILSVRC2012_validation_ground_truth.txt": b"490\n", "map_clsloc.txt": ids},
    )
    return [{**jpeg, **files} for files in texts]


def read_data_set(kind: str, folder: Path, classes: int | None = 3) -> None:
    opened = open_pictures(f"{kind}:{folder}", "val", num_classes=classes)
    for index in range(min(len(opened), 8)):
        with contextlib.suppress(UnreadablePicture):
            opened.read(index)


def labels() -> list[Files]:
    return [{"x.txt": text.encode()} for text in ("cat\ndog\nfox\n", "\ufeffchat\n\nchien\r\nrenard é")]


# Graphs and exports


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
    files = _written(
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


# Training


@functools.cache
def state() -> TrainingState:
    made = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return TrainingState(made, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False), None, Position())


SETTINGS = {"epochs": Recipe().epochs, "seed": 0}
SNAPSHOT = "snapshots/step_000000001.pt"


def snapshots() -> list[Files]:
    random.seed(0)
    content = {"format": FORMAT, "settings": SETTINGS, **state().capture()}
    later = content | {"position": asdict(Position(epoch=2, total=9, best_epoch=1, epochs=[{"epoch": 1, "total": 4}]))}
    return [{SNAPSHOT: encoded(found)} for found in (content, later)]


def go_on(folder: Path) -> None:
    check = functools.partial(check_snapshot, model=state().model)
    content = open_folder(folder, SETTINGS, True, False, 2, check)
    if content:
        state().restore(content)


PARSERS = (
    Parser("checkpoint .pth", lambda: pickled(legacy=False), functools.partial(load, "x.pth")),
    Parser("checkpoint .pth, before torch 1.6", lambda: pickled(legacy=True), functools.partial(load, "x.pth")),
    Parser("checkpoint .safetensors", safe_tensors, functools.partial(load, "x.safetensors")),
    Parser("checkpoint without a card", nameless, functools.partial(identify, "x.pth")),
    Parser("checkpoint .ckpt of MindSpore", ckpts, lambda folder: load_float(plain_model(), folder / "x.ckpt")),
    Parser("dump of tensors", dumps, lambda folder: read_dump(folder / "x.npz")),
    Parser("snapshot of a repository", repositories, functools.partial(identify, "")),
    Parser("run card", cards, read_card),
    Parser("report", reports, make_report),
    Parser("policy", lambda: shipped("policies"), rules),
    Parser("configuration", configs, lambda folder: load_config(folder / "x.yaml")),
    Parser("recipe", lambda: shipped("recipes"), lambda folder: load_recipe(str(folder / "x.yaml"))),
    Parser("recipe of passes", lambda: shipped("passes"), lambda folder: load_passes(str(folder / "x.yaml"))),
    Parser("zip and map", archives, read_archive),
    Parser("table of pictures", tables, lambda folder: read_data_set("csv", folder, None)),
    Parser("tar shards", shards, functools.partial(read_data_set, "wds")),
    Parser("CIFAR", cifars, lambda folder: read_data_set("cifar", folder, None)),
    Parser("CIFAR, pickled", pickled_cifars, lambda folder: read_data_set("cifar-python", folder, None)),
    Parser("ILSVRC labels", validations, lambda folder: read_data_set("ilsvrc", folder, 1000)),
    *(
        [
            Parser("Parquet", parquets, functools.partial(read_data_set, "parquet")),
        ]
        if has_pyarrow
        else []
    ),
    Parser("class names", labels, lambda folder: class_names(3, str(folder / "x.txt"))),
    Parser("PNG", lambda: pictures(*PNGS), see),
    Parser("JPEG", lambda: pictures(*JPEGS), see),
    Parser("other pictures", lambda: pictures(*OTHERS), see),
    Parser("rare pictures", lambda: pictures(*RARE), see),
    Parser("ONNX", graphs, open_graph),
    Parser("FasterTransformer export", exports, read_artifact),
    Parser("artifact and its card", deployed, deploy),
    *([Parser("ExecuTorch program", programs, open_program)] if has_executorch else []),
    Parser("record of steps", step_records, lambda folder: Steps(folder / "x.steps", 1, False)),
    Parser("tuner file", tuner_files, lambda folder: read_tuned(folder / "x.in")),
    Parser("statistics", statistics, search_ranges),
    Parser("snapshot", snapshots, go_on),
    Parser("steps.csv", step_tables, resume_table, refuses=False),
)
