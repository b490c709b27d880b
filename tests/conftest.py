"""Shared by all tests: few threads, seeds, tiny configs and models, and the shared data folder; for whole commands a
micro model and a few small pictures."""

import copy
import functools
import gc
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command line, before torch is imported
os.environ["SWIN_QUANT_OPERATORS"] = "0"  # files must not depend on the compiler and CPU

import numpy as np
import pytest
import torch
import yaml
from allowed_skips import SkipReport
from commands import command
from commands import fork as fork
from commands import forked as forked
from commands import process_left_alone as process_left_alone
from commands import ranks as ranks
from commands import run as run
from hypothesis import settings
from PIL import Image

from swin_quant.backends import registry as backends
from swin_quant.backends.onnx import export as onnx_export
from swin_quant.backends.openvino import operators
from swin_quant.base import yaml_file
from swin_quant.base.cpu import reproducible
from swin_quant.base.files import configs_dir
from swin_quant.base.progress import tell_once
from swin_quant.config import defaults, load_config
from swin_quant.models import build_model
from swin_quant.models import registry as architectures
from swin_quant.quant.policy import apply_policy, load_policy

reproducible()  # as the command line, before any matrix product
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

SHARED = Path(os.environ.get("SWIN_QUANT_SHARED", Path(__file__).parents[2] / "shared"))
ROOT_KEYS = {
    "IMG_SIZE": "DATA",
    "OUTPUT_KIND": "MODEL",
    "STAGES": "MODEL.FEATURES",
    "WINDOWS": "MODEL.FEATURES",
    "NORM": "MODEL.FEATURES",
    "NUM_CLASSES": "MODEL",
    "DROP_RATE": "MODEL",
    "DROP_PATH_RATE": "MODEL",
}


# Two stages on 8 x 8 or 16 x 16 tokens: shifted windows, a mask and a patch merging, in milliseconds.
MICRO = {"EMBED_DIM": 16, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}
TINY = {"DEPTHS": [2, 1], "NUM_HEADS": [1, 2]}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}
CLASSES = ("cat", "dog", "fox")
VAL = 7  # uneven over two ranks, and over three classes


@pytest.fixture(autouse=True, scope="session")
def exported_once(tmp_path_factory):
    """Export equal models once a session, since torch's exporter takes seconds; its table is made once."""
    if importlib.util.find_spec("onnxscript") is None:
        yield
        return
    from exports import copied, kept
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_export, "to_onnx", kept(onnx_export.to_onnx, folder))
        patch.setattr(ONNXRegistry, "from_torchlib", copied(ONNXRegistry.from_torchlib))
        yield


@pytest.fixture(autouse=True, scope="session")
def parsed_once():
    """Parse equal YAML once a session: tests read shipped configs and policies thousands of times."""
    parse = functools.cache(yaml_file._plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_file, "_plain", lambda text: copy.deepcopy(parse(text)))
        yield


@pytest.fixture(autouse=True, scope="session")
def bundled_once():
    """Bundle the scripts of a page once a session, since that takes three seconds."""
    if importlib.util.find_spec("vl_convert") is None:
        yield
        return
    import vl_convert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", functools.cache(vl_convert.javascript_bundle))
        yield


@pytest.fixture(autouse=True)
def told_anew():
    """What is told once a process is told once a test."""
    tell_once.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def timed_briefly():
    """Time each engine for an instant: a second of each, as a user has it, makes no test's figures repeatable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swin_quant.verbs.timing.SECONDS", 0.01)
        yield


def pytest_configure(config):
    """In CI a skip for a reason that is not listed is a failure: 29 tests once waited for a library for months."""
    if os.environ.get("CI") == "true" and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(SkipReport(), "skips")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(items):
    """Mark what tests/slow.txt lists (`make slow-tests` measures it). Begin with the demo and the files that have slow
    tests: minutes at the end would leave the other workers idle."""
    listed = {*Path(__file__).with_name("slow.txt").read_text().split()}
    for item in items:
        if item.nodeid.partition("[")[0] in listed:
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name != "test_demo.py", item.path not in slow))


# A fork lacks the threads of engines that earlier tests left as garbage: to collect one there would wait for ever.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_collection_finish():
    """Keep the garbage collector off the 700,000 objects that exist before the first test, and from frequent looks at
    all that are made later: these took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


@pytest.fixture(autouse=True, scope="session")
def few_threads():
    """One thread, unless OMP_NUM_THREADS is set: parallel test workers share the cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random numbers, whatever ran before it."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks for every kind of device, 6,000 times


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch):
    """Progress lines depend on the clock; compared output must not."""
    monkeypatch.setattr("swin_quant.base.progress.clock", lambda: 0.0)


@pytest.fixture(autouse=True)
def messages_can_be_heard():
    """A session fixture's command sets up logging for this process: without this, caplog would get nothing."""
    log = logging.getLogger("swin_quant")
    log.handlers, log.propagate = [], True
    log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Output is as wide as without a terminal, whoever runs the tests: xdist sets a width."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def operators_folder(request, tmp_path_factory) -> Path:
    """The cache folder of OpenVINO's compiled operators, which lasts from session to session."""
    cache = getattr(request.config, "cache", None)
    return cache.mkdir("operators") if cache else tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def library(operators_folder) -> Path:
    """OpenVINO's operators, compiled where their sources changed since the last session: that takes 20 seconds."""
    if not shutil.which("g++") or operators.cpu_kind() is None:
        pytest.skip("needs g++ and AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(operators_folder))
        patch.delenv(operators.SWITCH)
        found = operators._library.__wrapped__()
    assert isinstance(found, Path), found
    return found


@pytest.fixture
def with_operators(library, monkeypatch):
    """Files for OpenVINO have compiled operators, as on a user's machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(library.parents[2]))
    monkeypatch.delenv(operators.SWITCH)
    operators._library.cache_clear()
    yield library
    operators._library.cache_clear()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data and checkpoints, which a checkout may lack."""
    if not SHARED.is_dir():
        pytest.skip("no shared data here; SWIN_QUANT_SHARED may name its folder")
    return SHARED


@pytest.fixture(scope="session")
def tiny_config():
    """make("swin" | "swinv2", KEY=value ...) -> the digits demo's config in two stages, keys replaced.

    V2's windows of a pre-training are as many as its stages."""

    def make(kind="swin", **keys):
        if not {"DEPTHS", "NUM_HEADS"} & keys.keys():
            keys = TINY | keys
        if kind == "swinv2" and "DEPTHS" in keys:
            keys = {"PRETRAINED_WINDOW_SIZES": [0] * len(keys["DEPTHS"])} | keys
        overrides = {f"{ROOT_KEYS.get(key, f'MODEL.{kind.upper()}')}.{key}": value for key, value in keys.items()}
        return load_config(configs_dir() / "demo" / f"{kind}_digits.yaml", overrides=overrides)

    return make


@pytest.fixture(scope="session")
def randomise():
    """Give every parameter of a model seeded random values; V2's norms, initially zero, would hide its branches."""

    def fill(model, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("logit_scale"):  # around 10, some beyond the limit of 100
                value = 2.3 + 1.5 * noise
            elif "norm" in name:
                value = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("weight"):
                value = noise / parameter[0].numel() ** 0.5
            else:
                value = 0.3 * noise
            parameter.data.copy_(value)
        return model

    return fill


@pytest.fixture(scope="session")
def tiny_model(tiny_config, randomise):
    """make("swin" | "swinv2", seed=0, KEY=value ...) -> a random tiny model in evaluation mode, nodes off."""

    def make(kind="swin", seed=0, **keys):
        return randomise(build_model(tiny_config(kind, **keys)), seed)

    return make


@pytest.fixture(scope="session")
def use_policy():
    """Apply a built-in policy by name to a model; returns the model."""

    def use(model, name):
        apply_policy(model, load_policy(name))
        return model

    return use


def _config(folder, kind, name=None, **keys):
    model = {"TYPE": kind, "NAME": name or f"{kind}_micro", "NUM_CLASSES": len(CLASSES)}
    model[kind.upper()] = MICRO | MORE[kind] | keys
    path = folder / f"{name or kind}.yaml"
    path.write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 32}, "MODEL": model, "TEST": {"CROP": False}}))
    return path


@pytest.fixture(scope="session")
def micro(tmp_path_factory, randomise) -> Path:
    """A folder with swin.yaml, swin.pth, swinv2.yaml, swinv2.pth: Microsoft's format, random weights."""
    folder = tmp_path_factory.mktemp("micro")
    for kind in ("swin", "swinv2"):
        model = randomise(build_model(load_config(_config(folder, kind))))
        state = {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}
        torch.save({"model": state}, folder / f"{kind}.pth")
    return folder


@pytest.fixture(scope="session")
def write_config():
    """write_config(folder, "swin", name, KEY=value) -> a YAML of the micro model with architecture keys replaced."""
    return _config


def _picture(seed, label):
    noise = np.random.default_rng(seed).integers(0, 128, (32, 32, 3))
    return Image.fromarray((noise + 40 * label).astype(np.uint8))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """train/<class>/*.png, 12 pictures; val/<class>/*.png, 7. Copy it before you change it."""
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 12), ("val", VAL)):
        for number in range(count):
            file = root / split / CLASSES[number % 3] / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            _picture(1000 * (split == "val") + number, number % 3).save(file)
    return root


@pytest.fixture(scope="session")
def snapshot():
    """snapshot(folder) -> {file: bytes} of all its files, to compare before and after."""
    return lambda folder: {str(f.relative_to(folder)): f.read_bytes() for f in Path(folder).rglob("*") if f.is_file()}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(entry, group) announces `entry` ("name = module:object") as an installed package would, by default a
    backend."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(Path(__file__).parent / "plugins")
    monkeypatch.syspath_prepend(tmp_path / "site")
    caches = [backends._found, architectures._discovered, defaults._discovered]
    for cache in caches:
        cache.cache_clear()

    def announce(entry, group=backends.ENTRY_POINTS):
        info = tmp_path / "site" / f"{entry.split()[0]}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {entry.split()[0]}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")

    yield announce
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def own_pictures(pictures, tmp_path) -> Path:
    """A copy of `pictures` that a test may damage."""
    return Path(shutil.copytree(pictures, tmp_path / "own"))


@pytest.fixture(scope="session")
def float_flags(micro, pictures):
    """The options that every calibration needs: V1, its weights, the pictures, 2 batches of 4."""
    return [
        *("--cfg", micro / "swin.yaml", "--checkpoint", micro / "swin.pth", "--data-path", pictures),
        *("--pictures", 8, "--batch", 4, "--device", "cpu"),
    ]


@pytest.fixture(scope="session")
def ft_flags(micro, pictures):
    """The same as flags of main.py."""
    return [
        *("--cfg", micro / "swin.yaml", "--resume", micro / "swin.pth", "--data-path", pictures),
        *("--num-calib-batch", 2, "--calib-batchsz", 4, "--device", "cpu", "--half", "none"),
    ]


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory, float_flags, scoring_flags) -> Path:
    """swin_micro_calib.pth and its card, with results under ft-mode1. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("calibrated")
    file = folder / "swin_micro_calib.pth"
    command("calibrate", *float_flags, "--policy", "ft-mode1", "--output", folder, "--quiet")
    command("evaluate", file, *scoring_flags, "--batch", 4, "--quiet")
    return file


@pytest.fixture(scope="session")
def scoring_flags(micro, pictures):
    """The options of an evaluation besides its checkpoint: the float32 baseline, and only the rows that a test
    needs."""
    return ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--half", "none"]


@pytest.fixture(scope="session")
def card_of():
    """card_of(checkpoint) -> the content of its run card."""
    return lambda checkpoint: json.loads(Path(checkpoint).with_suffix(".json").read_text())
