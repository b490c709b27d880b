"""Files as people have them, one function each, and how the tool answers: the cases of docs/results/given.md.

    python benchmarks/given_modules/given_cases.py CASE FOLDER PICTURES

runs one case in an empty FOLDER by the swin_quant that Python finds, and prints its outcome on the last line. PICTURES
holds folders of classes, PICTURES/train and PICTURES/val. A refusal counts as an outcome, a traceback as well.
"""

import hashlib
import json
import logging
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from given_files import (
    EXAMPLES,
    MEAN,
    STD,
    accuracy,
    answer,
    below,
    calibrate_on,
    calibrated,
    classes,
    command,
    config,
    distance,
    exported,
    logits,
    noise,
    normalising,
    permuted,
    pixels,
    renamed,
    repository,
    stored,
    weights,
)

CASES: dict[str, tuple[str, str, Callable[[Path, Path], str]]] = {}


def case(kind: str, text: str) -> Callable[[Callable[[Path, Path], str]], Callable[[Path, Path], str]]:
    """Register a case under its function's name: the kind of fault, and a table line."""

    def register(function: Callable[[Path, Path], str]) -> Callable[[Path, Path], str]:
        CASES[function.__name__] = kind, text, function
        return function

    return register


# Publishers' files


@case("publisher", "`preprocessor_config.json` says `do_normalize: false`")
def not_normalised(folder: Path, pictures: Path) -> str:
    return accuracy(repository(folder, normalising(), {}, {"do_normalize": False}), pictures)


@case("publisher", "`do_rescale: false`, for a network that takes 0 to 255")
def not_rescaled(folder: Path, pictures: Path) -> str:
    raw = {"do_rescale": False, "do_normalize": False}
    return accuracy(repository(folder, normalising(largest=255), {}, raw), pictures)


@case("publisher", "`config.json` says `hidden_act: relu`")
def relu(folder: Path, pictures: Path) -> str:
    return accuracy(repository(folder, weights(), {"hidden_act": "relu"}, {}), pictures)


@case("publisher", "`config.json` says `layer_norm_eps: 0.1`")
def epsilon(folder: Path, pictures: Path) -> str:
    return accuracy(repository(folder, weights(), {"layer_norm_eps": 0.1}, {}), pictures)


@case("publisher", "`preprocessor_config.json` with a key that nobody knows")
def unknown_key(folder: Path, pictures: Path) -> str:
    return accuracy(repository(folder, weights(), {}, {"do_sharpen": True}), pictures)


@case("publisher", "Microsoft's file whose pickled config says `QK_SCALE 0.3`")
def pickled_scale(folder: Path, pictures: Path) -> str:
    images = noise()
    pickled = {"MODEL": {"TYPE": "swin", "SWIN": {"QK_SCALE": 0.3, "WINDOW_SIZE": 4}}, "DATA": {"IMG_SIZE": 32}}
    torch.save({"model": weights(), "config": pickled}, folder / "swin.pth")
    return distance(folder / "swin.pth", logits("swin", images, **{"MODEL.SWIN.QK_SCALE": 0.3}), images)


@case(
    "publisher", "Microsoft's V2 file without tables whose pickled config says `PRETRAINED_WINDOW_SIZES [8, 8, 4, 2]`"
)
def pickled_windows(folder: Path, pictures: Path) -> str:
    images = noise()
    state = {key: value for key, value in weights("swinv2").items() if not key.endswith("coords_table")}
    sizes = [8, 8, 4, 2]
    pickled = {"MODEL": {"TYPE": "swinv2", "SWINV2": {"PRETRAINED_WINDOW_SIZES": sizes}}, "DATA": {"IMG_SIZE": 32}}
    torch.save({"model": state, "config": pickled}, folder / "swinv2.pth")
    reference = logits("swinv2", images, state, **{"MODEL.SWINV2.PRETRAINED_WINDOW_SIZES": sizes})
    return distance(folder / "swinv2.pth", reference, images)


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
    import swin_quant as sq

    published(folder, "SwinForMaskedImageModeling", encoder_stride=32)
    with torch.inference_mode():
        maps = sq.load(folder, output_kind="features").module(torch.randn(1, 3, 224, 224))
    return f"maps of {', '.join(str(one.shape[1]) for one in maps)} channels"


# Class names


@case("class names", "head permuted with its `id2label`, folders named as its labels")
def permuted_head(folder: Path, pictures: Path) -> str:
    return accuracy(permuted(folder, classes(pictures)), pictures)


@case("class names", "labels that differ from the folders in case and spaces alone")
def other_case(folder: Path, pictures: Path) -> str:
    return accuracy(permuted(folder, [name.upper() for name in classes(pictures)]), pictures)


@case("class names", "val lacks three of the classes of `id2label`")
def subset(folder: Path, pictures: Path) -> str:
    names = classes(pictures)
    data = folder / "data"
    for name in names[3:]:
        shutil.copytree(pictures / "val" / name, data / "val" / name)
    repository(folder, weights(), {"id2label": dict(enumerate(names))}, {})
    return accuracy(folder, data)


@case("class names", "train and val folders that differ in one name")
def one_name_differs(folder: Path, pictures: Path) -> str:
    data = folder / "data"
    renamed(pictures / "train", data / "train", {})
    renamed(pictures / "val", data / "val", {classes(pictures)[0]: "zeppelin"})
    torch.save(weights(), folder / "swin.pth")
    return answer(calibrated(folder / "swin.pth", data))


@case("class names", 'folders named "1" to "10"')
def numbered(folder: Path, pictures: Path) -> str:
    names = {name: str(place + 1) for place, name in enumerate(classes(pictures))}
    renamed(pictures / "val", folder / "data" / "val", names)
    torch.save(weights(), folder / "swin.pth")
    return accuracy(folder / "swin.pth", folder / "data", config=config())


@case("class names", "a head in another order, no names: is chance level said?")
def chance(folder: Path, pictures: Path) -> str:
    state = weights()
    state["head.weight"], state["head.bias"] = state["head.weight"].roll(3, 0), state["head.bias"].roll(3, 0)
    torch.save(state, folder / "swin.pth")
    return answer(calibrated(folder / "swin.pth", pictures), about="guessing")


# Pictures


@case("pictures", "`sq.calibrate` is given uint8")
def integers(folder: Path, pictures: Path) -> str:
    return calibrate_on(pixels(pictures))


@case("pictures", "`sq.calibrate` is given floats of 0 to 255")
def up_to_255(folder: Path, pictures: Path) -> str:
    return calibrate_on(pixels(pictures).float())


@case("pictures", "`sq.calibrate` is given 0 to 1, not normalised")
def up_to_1(folder: Path, pictures: Path) -> str:
    return calibrate_on(pixels(pictures) / 255)


@case("pictures", "`sq.calibrate` is given pictures that were normalised twice")
def twice(folder: Path, pictures: Path) -> str:
    return calibrate_on(((pixels(pictures) / 255 - MEAN) / STD - MEAN) / STD)


@case("pictures", "`sq.calibrate` is given NHWC")
def channels_last(folder: Path, pictures: Path) -> str:
    return calibrate_on(((pixels(pictures) / 255 - MEAN) / STD).permute(0, 2, 3, 1))


@case("pictures", "a model of 32 px is called with two pictures of 64 px")
def larger_pictures(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    model = sq.load(EXAMPLES / "swin_micro_cifar10.safetensors")
    return f"logits {list(model(torch.randn(2, 3, 64, 64)).shape)}"


@case("pictures", "an ONNX file of 32 px on ONNX Runtime, two pictures of 64 px")
def larger_in_file(folder: Path, pictures: Path) -> str:
    engine = exported("onnxruntime", folder).load()
    return f"logits {list(engine(torch.randn(2, 3, 64, 64)).shape)}"


@case("pictures", "a TIFF of 32-bit integers, 0 to 255: its mean, 127.5 by its samples")
def wide_tiff(folder: Path, pictures: Path) -> str:
    import numpy as np
    from PIL import Image

    import swin_quant as sq

    grey = Image.fromarray(np.tile(np.arange(256, dtype=np.int32), (256, 1)))
    grey.save(folder / "grey.tiff")
    opened = sq.pictures(folder / "grey.tiff").open()
    return f"mean {np.asarray(opened.read(0)).mean():.1f}"


@case("pictures", "half of the pictures of a class are called `.jfif`")
def jfif(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    renamed(pictures / "val", folder / "data" / "val", {})
    for file in sorted((folder / "data" / "val").glob("*/*"))[::2]:
        file.rename(file.with_suffix(".jfif"))
    return f"{len(sq.pictures(folder / 'data', 'val').open(10))} of {len(list((pictures / 'val').glob('*/*')))} taken"


@case("pictures", "a class folder holds a link to a folder elsewhere")
def link_out(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    renamed(pictures / "val", folder / "data" / "val", {})
    shutil.copytree(pictures / "train", folder / "elsewhere")
    (folder / "data" / "val" / classes(pictures)[0] / "more").symlink_to(folder / "elsewhere")
    taken, own = len(sq.pictures(folder / "data", "val").open(10)), len(list((pictures / "val").glob("*/*")))
    return f"{taken - own} pictures from elsewhere"


# Checkpoints


@case("checkpoints", "keys under `_orig_mod.module.`")
def two_prefixes(folder: Path, pictures: Path) -> str:
    return stored(folder, below("_orig_mod.module.", weights()))


@case("checkpoints", "Lightning's `model.` beside `criterion.weight` and a metric")
def beside_criterion(folder: Path, pictures: Path) -> str:
    beside = {"criterion.weight": torch.ones(10), "train_acc.total": torch.tensor(3)}
    return stored(folder, {"state_dict": below("model.", weights()) | beside, "epoch": 3})


@case("checkpoints", "`model_state_dict`, beside numpy scalars, a Path and a date")
def opaque(folder: Path, pictures: Path) -> str:
    import datetime

    import numpy as np

    beside = {"best": np.float64(70.1), "path": Path("runs"), "date": datetime.datetime(2026, 1, 1)}
    return stored(folder, {"model_state_dict": weights(), **beside})


@case("checkpoints", "`state_dict` and `state_dict_ema`: which one is taken?")
def averaged(folder: Path, pictures: Path) -> str:
    doubled = {key: 2 * value if key.startswith("head.") else value for key, value in weights().items()}
    far = stored(folder, {"state_dict": doubled, "state_dict_ema": weights()})
    return f"the average, {far}" if float(far.split()[-1]) < 1e-5 else "the last weights, nothing said"


@case("checkpoints", "masks of another picture size in the file")
def other_masks(folder: Path, pictures: Path) -> str:
    masks = {f"layers.0.blocks.{block}.attn_mask": torch.zeros(64, 16, 16) for block in (1,)}
    return stored(folder, {"model": weights() | masks})


@case("checkpoints", "sharded safetensors with their index")
def sharded(folder: Path, pictures: Path) -> str:
    from safetensors.torch import save_file

    state = weights()
    repository(folder, state, {}, {})
    (folder / "model.safetensors").unlink()
    halves = [dict(list(state.items())[:90]), dict(list(state.items())[90:])]
    names = [f"model-{place + 1:05}-of-00002.safetensors" for place in range(2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    index = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    images = noise()
    return distance(folder, logits("swin", images), images)


@case("checkpoints", "`timm:swin_s3_tiny_224` with timm's own state_dict")
def foreign_names(folder: Path, pictures: Path) -> str:
    import swin_quant as sq
    from swin_quant.base.compat import import_timm

    torch.manual_seed(0)
    model = import_timm().create_model("swin_s3_tiny_224").eval()
    torch.save(model.state_dict(), folder / "s3.pth")
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        ours = sq.load(folder / "s3.pth", config="timm:swin_s3_tiny_224").module(images)
        return f"logits off by {(ours - model(images)).abs().max():.1e}"


# Entry points


@case("doors", "Parquet of 1,000 rows that share one label of 4 MB: peak memory")
def long_label(folder: Path, pictures: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    label = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * (4 << 20)]))
    image = pa.array([b"no picture"] * 1000)
    table = pa.table({"image": image, "label": label})
    pq.write_table(table, folder / "val.parquet", compression="zstd")
    del table, label
    words = ("--data-path", f"parquet:{folder / 'val.parquet'}", "--output", folder / "out")
    done = command("calibrate", EXAMPLES / "swin_micro_cifar10.safetensors", *words)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    size = (folder / "val.parquet").stat().st_size
    return f"{peak:,} MB for a file of {size / 1000:.1f} kB: {answer(done)}"


@case("doors", "an ONNX file with a negative scale in the body of an If")
def scale_in_body(folder: Path, pictures: Path) -> str:
    import onnx
    from onnx import TensorProto, helper

    file = exported("onnxruntime", folder).file
    proto = onnx.load(file)
    last = proto.graph.node[-1]
    name, last.output[0] = last.output[0], "before"
    scales = [helper.make_tensor("scale", TensorProto.FLOAT, [], [sign]) for sign in (0.05, -0.05)]
    zero = helper.make_tensor("zero", TensorProto.INT8, [], [0])
    inside = [
        *(
            helper.make_node("Constant", [], [scale_name], value=scale)
            for scale_name, scale in zip(("s", "t"), scales, strict=True)
        ),
        helper.make_node("Constant", [], ["z"], value=zero),
        helper.make_node("QuantizeLinear", ["before", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "t", "z"], ["inner"]),
    ]
    result = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    body = helper.make_graph(inside, "body", [], [result])
    proto.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    proto.graph.node.append(helper.make_node("If", ["yes"], [name], then_branch=body, else_branch=body))
    onnx.save(proto, file)
    card = file.with_suffix(".json")
    changed = hashlib.sha256(file.read_bytes()).hexdigest()
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
    again = operators.library()
    is_same = again.stat().st_mtime_ns == written
    return "loaded as they are" if is_same else f"compiled anew, mode {again.stat().st_mode & 0o777:o}"


# Result names


@case(
    "results",
    "`quantize` for ONNX Runtime, then for OpenVINO with other passes, into one folder: `verify` of the first",
)
def two_engines(folder: Path, pictures: Path) -> str:
    known = ("--cfg", config(), "--data-path", pictures, "--pictures", 16, "--output", folder / "out")
    for words in (("onnxruntime",), ("openvino", "--passes", "fast")):
        command("quantize", EXAMPLES / "swin_micro_cifar10.safetensors", *known, "--for", *words)
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

    import swin_quant as sq
    from swin_quant.backends.openvino.operators import library

    model = sq.load(EXAMPLES / "swin_micro_cifar10.safetensors")
    sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "cpu-operators")
    core, images = ov.Core(), noise().numpy()
    core.add_extension(str(library()))
    graph = core.read_model(sq.export(model, "openvino", folder / "out").file)
    ov.save_model(graph, folder / "saved.xml", compress_to_fp16=False)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    both = [
        core.compile_model(one, "CPU", exact)([images])[0] for one in (graph, core.read_model(folder / "saved.xml"))
    ]
    noisy, signal = ((both[0] - both[1]) ** 2).sum(), (both[0] ** 2).sum()
    return "the same bits" if not noisy else f"{10 * math.log10(signal / noisy):.0f} dB between them"


@case("results", '`sq.calibrate(model, data, "qdq")`, then `sq.export(model, "openvino")`: policy of the file')
def exported_policy(folder: Path, pictures: Path) -> str:
    card = exported("openvino", folder).file.with_suffix(".json")
    return str(json.loads(card.read_text())["policy"]["name"])


@case("results", "`nodes --policy ft-mode1 FILE`")
def words_before_file(folder: Path, pictures: Path) -> str:
    model = EXAMPLES / "swin_micro_cifar10.safetensors"
    done = command("show", model, "--policy", "ft-mode1")
    return f"{len(done.stdout.splitlines())} lines" if not done.returncode else answer(done)


# Modules of plain PyTorch


def wrapped(run: Callable[..., Any], change: Callable[[Any], Any] = lambda module: None, **parts: Any) -> str:
    """The SQNR of a module's int8 form against the module, and how far its float form is after `calibrate`."""

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return run(self, x)

    import swin_quant as sq

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


@case("modules", "batch norm before a layer whose weight the forward pass reads again")
def tied_decoder(folder: Path, pictures: Path) -> str:
    def spread(module: Any) -> None:
        module.n.running_var.uniform_(0.1, 9)

    def run(module: Any, x: Any) -> Any:
        return torch.nn.functional.conv_transpose2d(module.n(module.a(x)).relu(), module.a.weight)

    return wrapped(run, spread, a=lambda: torch.nn.Conv2d(3, 8, 3), n=lambda: torch.nn.BatchNorm2d(8))


@case("modules", "equalization of a layer whose weight the forward pass reads again")
def equalized_elsewhere(folder: Path, pictures: Path) -> str:
    def loud(module: Any) -> None:
        module.a.weight.data[0] *= 100

    def run(module: Any, x: Any) -> Any:
        return module.b(module.a(x).relu()) + torch.nn.functional.conv2d(x, module.a.weight)

    return wrapped(run, loud, a=lambda: torch.nn.Conv2d(3, 8, 3), b=lambda: torch.nn.Conv2d(8, 8, 1))


@case("modules", "an activation in place whose input is read again")
def read_again(folder: Path, pictures: Path) -> str:
    def run(module: Any, x: Any) -> Any:
        t = module.a(x)
        return module.b(module.r(t)) + t

    parts = {"a": lambda: torch.nn.Conv2d(3, 8, 3), "b": lambda: torch.nn.Conv2d(8, 8, 1)}
    return wrapped(run, r=lambda: torch.nn.ReLU(inplace=True), **parts)


@case("modules", "a forward hook on a convolution")
def hooked(folder: Path, pictures: Path) -> str:
    def hook(module: Any) -> None:
        module.a.register_forward_hook(lambda layer, inputs, output: output * 2)

    return wrapped(lambda module, x: module.a(x), hook, a=lambda: torch.nn.Conv2d(3, 8, 3))


@case("modules", "`torch.nn.utils.weight_norm` on a linear")
def weight_norm(folder: Path, pictures: Path) -> str:
    linear = torch.nn.utils.weight_norm
    return wrapped(lambda module, x: module.a(x.flatten(1)), a=lambda: linear(torch.nn.Linear(192, 5)))


@case("modules", "`int(x.shape[0])` as the batch")
def int_of_batch(folder: Path, pictures: Path) -> str:
    def run(module: Any, x: Any) -> Any:
        return module.a(x).view(int(x.shape[0]) * 2, -1).view(int(x.shape[0]), -1)

    return wrapped(run, a=lambda: torch.nn.Conv2d(3, 8, 3))


@case("modules", "a subclass of `nn.Linear` that adds its input in its own forward pass, exported for ONNX Runtime")
def adds_within(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    class Residual(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return x.sigmoid() + super().forward(x)

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(64, 8), Residual(8, 8), torch.nn.Linear(8, 5))
    x = torch.randn(6, 3, 8, 8)
    model = sq.calibrate(sq.wrap(module.eval(), 8), [x], "qdq", passes=[])
    found, wanted = sq.export(model, "onnxruntime", folder).load()(x), module(x).detach()
    return f"int8 {10 * (wanted.square().sum() / (found - wanted).square().sum()).log10():.0f} dB"


@case("modules", "GPTQ of a weight that two layers share: is it the one that was given?")
def shared_weight(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 8), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    module = torch.nn.Sequential(torch.nn.Flatten(2), *layers).eval()
    module[4].weight = module[2].weight
    given, x = module[2].weight.detach().clone(), torch.randn(12, 3, 8, 8)
    model = sq.calibrate(sq.wrap(module, 8), list(x.split(4)), "qdq", passes=[{"name": "gptq"}])
    same = torch.equal(model.module.get_parameter("2.weight"), given)
    return "the one that was given" if same else "another one"


@case("modules", "pickle of a wrapped model")
def pickled(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    torch.save(sq.wrap(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), 8), folder / "model.pth")
    return "saved"


@case("modules", '`sq.calibrate(model, "qdq", data)`')
def exchanged(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    model = sq.wrap(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), 8)
    sq.calibrate(model, "qdq", [torch.randn(6, 3, 8, 8)])  # type: ignore[arg-type]
    return "calibrated"


@case("modules", "`sq.wrap(net)` without a size")
def without_size(folder: Path, pictures: Path) -> str:
    import swin_quant as sq

    sq.wrap(torch.nn.Linear(8, 5))  # type: ignore[call-arg]
    return "wrapped"


def main(name: str, folder: str, pictures: str) -> None:
    """Run one case and print its outcome."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    start = time.monotonic()
    try:
        found = CASES[name][2](Path(folder), Path(pictures))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = f"{type(error).__name__}: {lines[0]}"
    print(json.dumps({"outcome": found, "seconds": round(time.monotonic() - start, 1)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
