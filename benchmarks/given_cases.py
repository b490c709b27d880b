"""Files as people have them, and how the tool answers: the cases of docs/results/given.md.

    python benchmarks/given_cases.py CASE FOLDER PICTURES

runs one case in an empty FOLDER by the swin_quant that Python finds, and prints its outcome on the last line. PICTURES
holds folders of classes, PICTURES/train and PICTURES/val. A refusal counts as an outcome, a traceback as well.
"""

import datetime
import hashlib
import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import swin_quant as sq

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "checkpoints"
MICRO, CONFIG = EXAMPLES / "swin_micro_cifar10.safetensors", EXAMPLES / "swin_micro_cifar10.yaml"
MEAN, STD = (torch.tensor(values).view(1, 3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
HUB = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "window_size": 4, "depths": [2, 2, 6, 2]}
HUB |= {"num_heads": [1, 2, 4, 8], "architectures": ["SwinForImageClassification"], "model_type": "swin"}
PROCESSOR = {"do_resize": True, "size": {"height": 32, "width": 32}, "do_rescale": True, "do_normalize": True}
PROCESSOR |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3}

Case = Callable[[Path, Path], str]  # a folder to write to, pictures -> the outcome
CASES: dict[str, tuple[str, str, Case]] = {}  # name -> kind of fault, line of the table, the case


def case(kind: str, text: str) -> Callable[[Case], Case]:
    """Register a case under its function's name."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = kind, text, function
        return function

    return register


def add(kind: str, rows: Iterable[Sequence[Any]], run: Callable[..., str]) -> None:
    """Register a case for each row: its name, its line of the table, and the arguments of `run` before the folders."""
    for name, text, *given in rows:
        CASES[name] = kind, text, partial(run, *given)


def weights(name: str = "swin") -> dict[str, Tensor]:
    """An example's weights under Microsoft's names."""
    return load_file(EXAMPLES / f"{name}_micro_cifar10.safetensors")


def normalising(largest: int) -> dict[str, Tensor]:
    """An example's weights for pictures from 0 to `largest`, which the first layer normalises."""
    state = weights()
    kernel = state["patch_embed.proj.weight"]
    state["patch_embed.proj.bias"] -= (kernel * MEAN / STD).sum((1, 2, 3))
    state["patch_embed.proj.weight"] = kernel / STD / largest
    return state


def noise() -> Tensor:
    """Four pictures of normal noise [4, 3, 32, 32], always the same."""
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def repository(folder: Path, state: dict[str, Tensor], more: dict[str, Any], processor: dict[str, Any]) -> Path:
    """A folder as on the hub."""
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HUB | more))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | processor))
    return folder


def permuted(folder: Path, names: list[str]) -> Path:
    """A hub folder whose head has the classes in another order, given by its `id2label`."""
    state, order = weights(), torch.randperm(10, generator=torch.Generator().manual_seed(1))
    state["head.weight"], state["head.bias"] = state["head.weight"][order], state["head.bias"][order]
    labels = {str(place): names[index] for place, index in enumerate(order.tolist())}
    return repository(folder, state, {"id2label": labels}, {})


def accuracy(checkpoint: Path, pictures: Path, **options: Any) -> str:
    """Top-1 of the float model on PICTURES/val, from `evaluate`."""
    scored = sq.evaluate(sq.load(checkpoint, **options), sq.pictures(pictures, "val"), half="none")
    return f"{scored.results[0].acc1:.1f} %"


def distance(checkpoint: Path, reference: Tensor, images: Tensor, **options: Any) -> str:
    """The largest difference of logits from `reference`."""
    with torch.inference_mode():
        return f"logits off by {(sq.load(checkpoint, **options).module(images) - reference).abs().max():.1e}"


def logits(name: str, state: dict[str, Tensor] | None = None, **keys: Any) -> Tensor:
    """An example's logits for noise from our module, which tests compare with timm's."""
    from swin_quant.config import load_config
    from swin_quant.models import build_model

    model = build_model(load_config(EXAMPLES / f"{name}_micro_cifar10.yaml", overrides=keys))
    model.load_state_dict(state or weights(name), strict=False)
    with torch.inference_mode():
        return model.eval()(noise())


def stored(folder: Path, content: Any) -> str:
    """How far a saved object's logits are from its example's."""
    torch.save(content, folder / "swin.pth")
    return distance(folder / "swin.pth", logits("swin"), noise(), config=CONFIG)


def command(*words: Any) -> "subprocess.CompletedProcess[str]":
    """The output and the end of `swin-quant WORDS`."""
    run = [sys.executable, "-m", "swin_quant", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True, timeout=300)


def answer(done: "subprocess.CompletedProcess[str]", about: str = "") -> str:
    """The accuracies in the card that a command printed, or its refusal; and the log line that holds `about`."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return f"exit {done.returncode}: {(lines or done.stdout.splitlines() or ['nothing said'])[-1]}"
    results = [result for result in json.loads(done.stdout)["results"] if result["precision"] != "bfloat16"]
    found = ", ".join(f"{result['precision']} {result['acc1']:.1f} %" for result in results)
    line = next((line for line in lines if about in line), "nothing said") if about else ""
    return found + (f"; {line}" if line else "")


def calibrated(checkpoint: Path, data: Path) -> "subprocess.CompletedProcess[str]":
    """Run `calibrate` on an example's weights with 16 pictures, then `evaluate` on val; prints the run card."""
    out = checkpoint.parent / "out"
    done = command("calibrate", checkpoint, "--cfg", CONFIG, "--data-path", data, "--pictures", 16, "--output", out)
    for file in out.rglob("*_calib.pth"):
        done = command("evaluate", file, "--data-path", data)
        done.stdout = file.with_suffix(".json").read_text()
    return done


def renamed(source: Path, target: Path, names: dict[str, str]) -> Path:
    """The class folders of a split under other names."""
    for folder in sorted(source.iterdir()):
        shutil.copytree(folder, target / names.get(folder.name, folder.name))
    return target


def classes(pictures: Path) -> list[str]:
    return sorted(folder.name for folder in (pictures / "val").iterdir())


def exported(engine: str, folder: Path) -> Any:
    """The example, calibrated on noise and exported for an engine."""
    model = sq.calibrate(sq.load(MICRO), [torch.randn(8, 3, 32, 32)], "qdq")
    return sq.export(model, engine, folder / "out")


# Publishers' files: name, line of the table, weights, changes of config.json and of preprocessor_config.json
PUBLISHED = (
    ("not_normalised", "`preprocessor_config.json` says `do_normalize: false`",
     partial(normalising, 1), {}, {"do_normalize": False}),
    ("not_rescaled", "`do_rescale: false`, for a network that takes 0 to 255",
     partial(normalising, 255), {}, {"do_rescale": False, "do_normalize": False}),
    ("relu", "`config.json` says `hidden_act: relu`", weights, {"hidden_act": "relu"}, {}),
    ("epsilon", "`config.json` says `layer_norm_eps: 0.1`", weights, {"layer_norm_eps": 0.1}, {}),
    ("unknown_key", "`preprocessor_config.json` with a key that nobody knows", weights, {}, {"do_sharpen": True}),
)  # fmt: skip
add("publisher", PUBLISHED, lambda state, more, processor, folder, pictures:
    accuracy(repository(folder, state(), more, processor), pictures))  # fmt: skip


@case("publisher", "Microsoft's file whose pickled config says `QK_SCALE 0.3`")
def pickled_scale(folder: Path, pictures: Path) -> str:
    pickled = {"MODEL": {"TYPE": "swin", "SWIN": {"QK_SCALE": 0.3, "WINDOW_SIZE": 4}}, "DATA": {"IMG_SIZE": 32}}
    torch.save({"model": weights(), "config": pickled}, folder / "swin.pth")
    return distance(folder / "swin.pth", logits("swin", **{"MODEL.SWIN.QK_SCALE": 0.3}), noise())


@case(
    "publisher", "Microsoft's V2 file without tables whose pickled config says `PRETRAINED_WINDOW_SIZES [8, 8, 4, 2]`"
)
def pickled_windows(folder: Path, pictures: Path) -> str:
    state, sizes = weights("swinv2"), [8, 8, 4, 2]
    state = {key: value for key, value in state.items() if not key.endswith("coords_table")}
    pickled = {"MODEL": {"TYPE": "swinv2", "SWINV2": {"PRETRAINED_WINDOW_SIZES": sizes}}, "DATA": {"IMG_SIZE": 32}}
    torch.save({"model": state, "config": pickled}, folder / "swinv2.pth")
    reference = logits("swinv2", state, **{"MODEL.SWINV2.PRETRAINED_WINDOW_SIZES": sizes})
    return distance(folder / "swinv2.pth", reference, noise())


def published(folder: Path, kind: str, **options: Any) -> Any:
    """A model of transformers with four stages and random weights, written to `folder`."""
    from swin_quant.base.compat import import_torchvision

    import_torchvision()
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.SwinConfig(**options)).eval()
    model.save_pretrained(folder)
    return model


@case("publisher", "a folder that `transformers` writes for a Swin of four stages")
def four_stages(folder: Path, pictures: Path) -> str:
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        wanted = published(folder, "SwinForImageClassification", num_labels=10)(images).logits
    return distance(folder, wanted, images)


@case("publisher", "`SwinForMaskedImageModeling` of `transformers`, as a backbone")
def masked_modelling(folder: Path, pictures: Path) -> str:
    published(folder, "SwinForMaskedImageModeling", encoder_stride=32)
    with torch.inference_mode():
        maps = sq.load(folder, output_kind="features").module(torch.randn(1, 3, 224, 224))
    return f"maps of {', '.join(str(one.shape[1]) for one in maps)} channels"


LABELLED = (
    ("permuted_head", "head permuted with its `id2label`, folders named as its labels", str),
    ("other_case", "labels that differ from the folders in case and spaces alone", str.upper),
)
add("class names", LABELLED, lambda change, folder, pictures:
    accuracy(permuted(folder, list(map(change, classes(pictures)))), pictures))  # fmt: skip


@case("class names", "val lacks three of the classes of `id2label`")
def subset(folder: Path, pictures: Path) -> str:
    names, data = classes(pictures), folder / "data"
    for name in names[3:]:
        shutil.copytree(pictures / "val" / name, data / "val" / name)
    return accuracy(repository(folder, weights(), {"id2label": dict(enumerate(names))}, {}), data)


@case("class names", "train and val folders that differ in one name")
def one_name_differs(folder: Path, pictures: Path) -> str:
    renamed(pictures / "train", folder / "data" / "train", {})
    renamed(pictures / "val", folder / "data" / "val", {classes(pictures)[0]: "zeppelin"})
    torch.save(weights(), folder / "swin.pth")
    return answer(calibrated(folder / "swin.pth", folder / "data"))


@case("class names", 'folders named "1" to "10"')
def numbered(folder: Path, pictures: Path) -> str:
    names = {name: str(place + 1) for place, name in enumerate(classes(pictures))}
    renamed(pictures / "val", folder / "data" / "val", names)
    torch.save(weights(), folder / "swin.pth")
    return accuracy(folder / "swin.pth", folder / "data", config=CONFIG)


@case("class names", "a head in another order, no names: is chance level said?")
def chance(folder: Path, pictures: Path) -> str:
    state = weights()
    state["head.weight"], state["head.bias"] = state["head.weight"].roll(3, 0), state["head.bias"].roll(3, 0)
    torch.save(state, folder / "swin.pth")
    return answer(calibrated(folder / "swin.pth", pictures), about="guessing")


# What `sq.calibrate` is given: name, line of the table, the batch of eight pictures, uint8 [8, 3, 32, 32]
GIVEN = (
    ("integers", "uint8", lambda pixels: pixels),
    ("up_to_255", "floats of 0 to 255", lambda pixels: pixels.float()),
    ("up_to_1", "0 to 1, not normalised", lambda pixels: pixels / 255),
    ("twice", "pictures that were normalised twice", lambda pixels: ((pixels / 255 - MEAN) / STD - MEAN) / STD),
    ("channels_last", "NHWC", lambda pixels: ((pixels / 255 - MEAN) / STD).permute(0, 2, 3, 1)),
)


def calibrate_on(change: Callable[[Tensor], Tensor], folder: Path, pictures: Path) -> str:
    files = sorted((pictures / "val").glob("*/*"))[:8]
    pixels = np.stack([np.array(Image.open(file).convert("RGB")) for file in files])
    sq.calibrate(sq.load(MICRO), [change(torch.from_numpy(pixels).permute(0, 3, 1, 2))], "qdq")
    return "calibrated"


add("pictures", ((name, f"`sq.calibrate` is given {text}", change) for name, text, change in GIVEN), calibrate_on)


@case("pictures", "a model of 32 px is called with two pictures of 64 px")
def larger_pictures(folder: Path, pictures: Path) -> str:
    return f"logits {list(sq.load(MICRO)(torch.randn(2, 3, 64, 64)).shape)}"


@case("pictures", "an ONNX file of 32 px on ONNX Runtime, two pictures of 64 px")
def larger_in_file(folder: Path, pictures: Path) -> str:
    return f"logits {list(exported('onnxruntime', folder).load()(torch.randn(2, 3, 64, 64)).shape)}"


@case("pictures", "a TIFF of 32-bit integers, 0 to 255: its mean, 127.5 by its samples")
def wide_tiff(folder: Path, pictures: Path) -> str:
    Image.fromarray(np.tile(np.arange(256, dtype=np.int32), (256, 1))).save(folder / "grey.tiff")
    return f"mean {np.asarray(sq.pictures(folder / 'grey.tiff').open().read(0)).mean():.1f}"


@case("pictures", "half of the pictures of a class are called `.jfif`")
def jfif(folder: Path, pictures: Path) -> str:
    renamed(pictures / "val", folder / "data" / "val", {})
    for file in sorted((folder / "data" / "val").glob("*/*"))[::2]:
        file.rename(file.with_suffix(".jfif"))
    return f"{len(sq.pictures(folder / 'data', 'val').open(10))} of {len(list((pictures / 'val').glob('*/*')))} taken"


@case("pictures", "a class folder holds a link to a folder elsewhere")
def link_out(folder: Path, pictures: Path) -> str:
    renamed(pictures / "val", folder / "data" / "val", {})
    shutil.copytree(pictures / "train", folder / "elsewhere")
    (folder / "data" / "val" / classes(pictures)[0] / "more").symlink_to(folder / "elsewhere")
    taken, own = len(sq.pictures(folder / "data", "val").open(10)), len(list((pictures / "val").glob("*/*")))
    return f"{taken - own} pictures from elsewhere"


# Checkpoints: name, line of the table, what is stored of the weights
STORED = (
    ("two_prefixes", "keys under `_orig_mod.module.`",
     lambda state: {f"_orig_mod.module.{key}": value for key, value in state.items()}),
    ("beside_criterion", "Lightning's `model.` beside `criterion.weight` and a metric",
     lambda state: {"state_dict": {f"model.{key}": value for key, value in state.items()}
                    | {"criterion.weight": torch.ones(10), "train_acc.total": torch.tensor(3)}, "epoch": 3}),
    ("opaque", "`model_state_dict`, beside numpy scalars, a Path and a date",
     lambda state: {"model_state_dict": state, "best": np.float64(70.1), "path": Path("runs"),
                    "date": datetime.datetime(2026, 1, 1)}),
    ("other_masks", "masks of another picture size in the file",
     lambda state: {"model": state | {"layers.0.blocks.1.attn_mask": torch.zeros(64, 16, 16)}}),
)  # fmt: skip
add("checkpoints", STORED, lambda make, folder, pictures: stored(folder, make(weights())))


@case("checkpoints", "`state_dict` and `state_dict_ema`: which one is taken?")
def averaged(folder: Path, pictures: Path) -> str:
    doubled = {key: 2 * value if key.startswith("head.") else value for key, value in weights().items()}
    far = stored(folder, {"state_dict": doubled, "state_dict_ema": weights()})
    return f"the average, {far}" if float(far.split()[-1]) < 1e-5 else "the last weights, nothing said"


@case("checkpoints", "sharded safetensors with their index")
def sharded(folder: Path, pictures: Path) -> str:
    state = list(weights().items())
    repository(folder, dict(state), {}, {})
    (folder / "model.safetensors").unlink()
    halves = {"model-00001-of-00002.safetensors": state[:90], "model-00002-of-00002.safetensors": state[90:]}
    for name, half in halves.items():
        save_file(dict(half), folder / name)
    index = {key: name for name, half in halves.items() for key, _ in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return distance(folder, logits("swin"), noise())


@case("checkpoints", "`timm:swin_s3_tiny_224` with timm's own state_dict")
def foreign_names(folder: Path, pictures: Path) -> str:
    from swin_quant.base.compat import import_timm

    torch.manual_seed(0)
    model, images = import_timm().create_model("swin_s3_tiny_224").eval(), torch.randn(1, 3, 224, 224)
    torch.save(model.state_dict(), folder / "s3.pth")
    with torch.inference_mode():
        return distance(folder / "s3.pth", model(images), images, config="timm:swin_s3_tiny_224")


@case("doors", "Parquet of 1,000 rows that share one label of 4 MB: peak memory")
def long_label(folder: Path, pictures: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    label = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * (4 << 20)]))
    table = pa.table({"image": pa.array([b"no picture"] * 1000), "label": label})
    pq.write_table(table, folder / "val.parquet", compression="zstd")
    done = command("calibrate", MICRO, "--data-path", f"parquet:{folder / 'val.parquet'}", "--output", folder / "out")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    return f"{peak:,} MB for a file of {(folder / 'val.parquet').stat().st_size / 1000:.1f} kB: {answer(done)}"


@case("doors", "an ONNX file with a negative scale in the body of an If")
def scale_in_body(folder: Path, pictures: Path) -> str:
    import onnx
    from onnx import TensorProto, helper

    file = exported("onnxruntime", folder).file
    proto = onnx.load(file)
    last = proto.graph.node[-1]
    name, last.output[0] = last.output[0], "before"
    constants = {"s": helper.make_tensor("scale", TensorProto.FLOAT, [], [0.05])}
    constants["t"] = helper.make_tensor("scale", TensorProto.FLOAT, [], [-0.05])
    constants["z"] = helper.make_tensor("zero", TensorProto.INT8, [], [0])
    inside = [helper.make_node("Constant", [], [key], value=value) for key, value in constants.items()]
    inside.append(helper.make_node("QuantizeLinear", ["before", "s", "z"], ["q"]))
    inside.append(helper.make_node("DequantizeLinear", ["q", "t", "z"], ["inner"]))
    body = helper.make_graph(inside, "body", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)])
    proto.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    proto.graph.node.append(helper.make_node("If", ["yes"], [name], then_branch=body, else_branch=body))
    onnx.save(proto, file)
    card, changed = file.with_suffix(".json"), hashlib.sha256(file.read_bytes()).hexdigest()
    card.write_text(card.read_text().replace(json.loads(card.read_text())["artifact"]["sha256"], changed))
    done = command("evaluate", file, "--engine", "onnxruntime", "--data-path", pictures)
    done.stdout = card.read_text()
    return answer(done)


@case("doors", "the compiled operators in the cache, made writable for everyone: are they loaded?")
def open_library(folder: Path, pictures: Path) -> str:
    from swin_quant.backends.openvino import operators

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    library = operators.library()
    library.chmod(0o777)
    written = library.stat().st_mtime_ns
    operators._library.cache_clear()
    again = operators.library().stat()
    return "loaded as they are" if again.st_mtime_ns == written else f"compiled anew, mode {again.st_mode & 0o777:o}"


@case(
    "results",
    "`quantize` for ONNX Runtime, then for OpenVINO with other passes, into one folder: `verify` of the first",
)
def two_engines(folder: Path, pictures: Path) -> str:
    known = ("--cfg", CONFIG, "--data-path", pictures, "--pictures", 16, "--output", folder / "out")
    for words in (("onnxruntime",), ("openvino", "--passes", "fast")):
        command("quantize", MICRO, *known, "--for", *words)
    first = next(iter((folder / "out").glob("**/*_int8_onnxruntime.onnx")), folder / "none.onnx")
    done = command("verify", first, "--data-path", pictures)
    return "verified" if not done.returncode else answer(done)


@case("results", "a run card whose mean was edited, beside an ONNX file that says another: `predict`")
def edited_card(folder: Path, pictures: Path) -> str:
    file = exported("onnxruntime", folder).file
    card = json.loads(file.with_suffix(".json").read_text())
    card["preprocess"]["mean"] = [0.9, 0.9, 0.9]
    file.with_suffix(".json").write_text(json.dumps(card))
    done = command("predict", file, next((pictures / "val").glob("*/*")), "--engine", "onnxruntime")
    return "a class, nothing said" if not done.returncode else answer(done)


@case(
    "results",
    "a file with compiled operators, saved by `ov.save_model` in float32: its logits beside the compiled ones",
)
def saved_by_openvino(folder: Path, pictures: Path) -> str:
    import openvino as ov

    from swin_quant.backends.openvino.operators import library

    model = sq.calibrate(sq.load(MICRO), [torch.randn(8, 3, 32, 32)], "cpu-operators")
    core = ov.Core()
    core.add_extension(str(library()))
    graph = core.read_model(sq.export(model, "openvino", folder / "out").file)
    ov.save_model(graph, folder / "saved.xml", compress_to_fp16=False)
    both = (graph, core.read_model(folder / "saved.xml"))
    exact, other = (core.compile_model(one, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([noise()])[0] for one in both)
    far = ((exact - other) ** 2).sum()
    return "the same bits" if not far else f"{10 * math.log10((exact**2).sum() / far):.0f} dB between them"


@case("results", '`sq.calibrate(model, data, "qdq")`, then `sq.export(model, "openvino")`: policy of the file')
def exported_policy(folder: Path, pictures: Path) -> str:
    card = exported("openvino", folder).file.with_suffix(".json")
    return str(json.loads(card.read_text())["policy"]["name"])


@case("results", "`nodes --policy ft-mode1 FILE`")
def words_before_file(folder: Path, pictures: Path) -> str:
    done = command("show", MICRO, "--policy", "ft-mode1")
    return f"{len(done.stdout.splitlines())} lines" if not done.returncode else answer(done)


def wrapped(run: Callable[..., Any], parts: dict[str, Callable[[], nn.Module]], change: Callable[[Any], Any]) -> str:
    """The SQNR of a module's int8 form against the module, and how far its float form is after `calibrate`."""

    class Module(nn.Module):
        def forward(self, x: Any) -> Any:
            return run(self, x)

    torch.manual_seed(0)
    module = Module()
    for name, part in parts.items():
        setattr(module, name, part())
    change(module.eval())
    x = torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        wanted = module(x)
    model = sq.calibrate(sq.wrap(module, 8), [x], "qdq", passes=["equalize"])
    noise, moved = model(x) - wanted, (model.module(x) - wanted).abs().max() / wanted.abs().max()
    return f"int8 {10 * (wanted.square().sum() / noise.square().sum()).log10():.0f} dB, float moved by {moved:.0e}"


CONV = {"a": lambda: nn.Conv2d(3, 8, 3)}
TWO = CONV | {"b": lambda: nn.Conv2d(8, 8, 1)}
# Modules of plain PyTorch: name, line of the table, forward pass, parts, and a change of the module
MODULES = (
    ("tied_decoder", "batch norm before a layer whose weight the forward pass reads again",
     lambda m, x: nn.functional.conv_transpose2d(m.n(m.a(x)).relu(), m.a.weight),
     CONV | {"n": lambda: nn.BatchNorm2d(8)}, lambda m: m.n.running_var.uniform_(0.1, 9)),
    ("equalized_elsewhere", "equalization of a layer whose weight the forward pass reads again",
     lambda m, x: m.b(m.a(x).relu()) + nn.functional.conv2d(x, m.a.weight), TWO,
     lambda m: m.a.weight.data[0].mul_(100)),
    ("read_again", "an activation in place whose input is read again",
     lambda m, x: (lambda t: m.b(m.r(t)) + t)(m.a(x)), {"r": lambda: nn.ReLU(inplace=True)} | TWO, lambda m: None),
    ("hooked", "a forward hook on a convolution", lambda m, x: m.a(x), CONV,
     lambda m: m.a.register_forward_hook(lambda layer, inputs, output: output * 2)),
    ("weight_norm", "`torch.nn.utils.weight_norm` on a linear", lambda m, x: m.a(x.flatten(1)),
     {"a": lambda: nn.utils.weight_norm(nn.Linear(192, 5))}, lambda m: None),
    ("int_of_batch", "`int(x.shape[0])` as the batch",
     lambda m, x: m.a(x).view(int(x.shape[0]) * 2, -1).view(int(x.shape[0]), -1), CONV, lambda m: None),
)  # fmt: skip
add("modules", MODULES, lambda run, parts, change, folder, pictures: wrapped(run, parts, change))


@case("modules", "a subclass of `nn.Linear` that adds its input in its own forward pass, exported for ONNX Runtime")
def adds_within(folder: Path, pictures: Path) -> str:
    class Residual(nn.Linear):
        def forward(self, x: Any) -> Any:
            return x.sigmoid() + super().forward(x)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), Residual(8, 8), nn.Linear(8, 5)).eval()
    x = torch.randn(6, 3, 8, 8)
    model = sq.calibrate(sq.wrap(module, 8), [x], "qdq", passes=[])
    found, wanted = sq.export(model, "onnxruntime", folder).load()(x), module(x).detach()
    return f"int8 {10 * (wanted.square().sum() / (found - wanted).square().sum()).log10():.0f} dB"


@case("modules", "GPTQ of a weight that two layers share: is it the one that was given?")
def shared_weight(folder: Path, pictures: Path) -> str:
    torch.manual_seed(0)
    layers = nn.Linear(64, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    module = nn.Sequential(nn.Flatten(2), *layers).eval()
    module[4].weight = module[2].weight
    given, x = module[2].weight.detach().clone(), torch.randn(12, 3, 8, 8)
    model = sq.calibrate(sq.wrap(module, 8), list(x.split(4)), "qdq", passes=[{"name": "gptq"}])
    same = torch.equal(model.module.get_parameter("2.weight"), given)
    return "the one that was given" if same else "another one"


@case("modules", "pickle of a wrapped model")
def pickled(folder: Path, pictures: Path) -> str:
    torch.save(sq.wrap(nn.Sequential(nn.Conv2d(3, 8, 3)), 8), folder / "model.pth")
    return "saved"


@case("modules", '`sq.calibrate(model, "qdq", data)`')
def exchanged(folder: Path, pictures: Path) -> str:
    model = sq.wrap(nn.Sequential(nn.Conv2d(3, 8, 3)), 8)
    sq.calibrate(model, "qdq", [torch.randn(6, 3, 8, 8)])  # type: ignore[arg-type]
    return "calibrated"


@case("modules", "`sq.wrap(net)` without a size")
def without_size(folder: Path, pictures: Path) -> str:
    sq.wrap(nn.Linear(8, 5))  # type: ignore[call-arg]
    return "wrapped"


def main(name: str, folder: str, pictures: str) -> None:
    """Run one case and print its outcome."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    try:
        found = CASES[name][2](Path(folder), Path(pictures))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = f"{type(error).__name__}: {lines[0]}"
    print(json.dumps({"outcome": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
