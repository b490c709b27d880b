"""The attacked parsers: valid files of each, made here, and a function that reads them as the tool does.

A case is a folder of files. `parse` may succeed or raise a SwinQuantError; everything else is a fault.
"""

import csv
import functools
import io
import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import yaml
from artifact_parsers import ARTIFACT_PARSERS
from parser_inputs import TESTS, Files, Parser, card, encoded, model, plain_model, written
from picture_parsers import PICTURE_PARSERS
from safetensors.torch import save as save_tensors
from torch import nn

from swin_quant.backends.fastertransformer.tuner import Tuned, read_tuned, write_tuned
from swin_quant.base.files import configs_dir, write_json
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.checkpoint import load_calibrated, load_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.checkpoint.mindspore import encode_ckpt
from swin_quant.checkpoint.names import to_mindspore
from swin_quant.checkpoint.opened import open_checkpoint
from swin_quant.config import from_dict, load_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.quant.observers import BINS
from swin_quant.quant.passes.recipe import load_passes
from swin_quant.quant.policy import load_policy, policy_from_dict, settings_for
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.ranges import search_range
from swin_quant.quant.statistics import Statistics, join_sides
from swin_quant.quant.statistics_file import read_statistics, statistics_bytes
from swin_quant.report import FORMATS
from swin_quant.score.alignment import read_dump
from swin_quant.train.outdir import STEP_COLUMNS, STEPS, Table, open_folder
from swin_quant.train.recipe import Recipe, load_recipe
from swin_quant.train.snapshot import FORMAT, Position, TrainingState, check_snapshot
from swin_quant.verbs.quantize_steps import Steps
from swin_quant.verbs.report import report

NODES = ["layers.0.a_quantizer", "layers.0.b_quantizer"]
DATASET = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "0" * 64}

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
    return [written("x.steps", functools.partial(write_json, value=some)) for some in ([one], [one, one])]


def tuner_files() -> list[Files]:
    entries = [Tuned(1, 128 * i, 64 * i, 32, 21, 0, 20, 0, 0, 0, 0, 15, 0.01 * i) for i in range(1, 6)]
    return [written("x.in", functools.partial(write_tuned, entries=found)) for found in (entries, entries[::-1])]


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
    *PICTURE_PARSERS,
    *ARTIFACT_PARSERS,
    Parser("record of steps", step_records, lambda folder: Steps(folder / "x.steps", 1, False)),
    Parser("tuner file", tuner_files, lambda folder: read_tuned(folder / "x.in")),
    Parser("statistics", statistics, search_ranges),
    Parser("snapshot", snapshots, go_on),
    Parser("steps.csv", step_tables, resume_table, refuses=False),
)
