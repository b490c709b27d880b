"""Any file under a checkpoint's name: its tensors are read, or one line says what it is, and none of its code runs."""

import argparse
import datetime
import functools
import os
import pickle
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from yacs.config import CfgNode

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import read_state_dict
from tests.helpers import refusals

STATE = OrderedDict(
    [("a.weight", torch.arange(6000.0).reshape(60, 100)), ("a.bias", torch.ones(60)), ("index", torch.arange(4))]
)


def refused(path: Path, *words: str) -> None:
    assert refusals.refused(lambda: read_state_dict(path), *words).startswith(f"{path}: ")


def same(state: dict[str, torch.Tensor]) -> bool:
    return list(state) == list(STATE) and all(torch.equal(state[key], STATE[key]) for key in STATE)


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def config() -> CfgNode:
    node = CfgNode({"MODEL": {"NAME": "x", "SWIN": {"DEPTHS": [2, 2], "QK_SCALE": None}}, "EPOCHS": 3})
    node.freeze()
    return node


HARMLESS = {
    "numbers": [np.float32(3.5), np.int64(2), np.arange(5), np.array(["a"]), np.random.default_rng(0), np.dtype("f4")],
    "places": [Path("data"), SimpleNamespace(a=Path("b"))],
    "calls": [functools.partial(int, base=2), functools.partial(torch.nn.LayerNorm, eps=1e-6)],
    "times": [datetime.datetime(2024, 1, 2), datetime.timedelta(1), datetime.timezone.utc],
    "counts": [defaultdict(int, {"a": np.float64(1)}), deque([1, 2]), {3}, complex(1, 2)],
}
WRAPPED = {
    "bare": STATE,
    "beside numbers": {**STATE, "epoch": 3, "best": np.float64(81.2)},
    "beside harmless objects": {"model": STATE, **HARMLESS},
    **{
        key: {key: STATE, "epoch": 1}
        for key in ("model_state_dict", "module", "net", "params", "teacher", "state_dict_ema", "model_ema", "mine")
    },
    "nested": {"state": {"model": STATE, "step": 3}},
    "nested twice": {"checkpoint": {"model_ema": {"module": STATE, "decay": 0.99}}},
    "beside small parts": {"net": STATE, "criterion": {"weight": torch.ones(9)}, "tracker": {"best": torch.ones(1)}},
    "model": {"model": STATE},
    "state_dict": {"state_dict": STATE, "epoch": 3},
    "training": {
        "model": STATE,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
        "lr_scheduler": {"t_initial": 10},
        "scaler": {},
        "max_accuracy": 81.2,
        "epoch": 299,
        "config": config(),
        "args": argparse.Namespace(local_rank=0, nested=config()),
    },
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_weights_come_out_of_every_wrapper(tmp_path, wrapper, legacy):
    path = tmp_path / "x.pth"
    torch.save(WRAPPED[wrapper], path, _use_new_zipfile_serialization=not legacy)
    state, source = read_state_dict(path)
    assert same(state)
    assert (source.path, source.format, len(source.sha256)) == (path, "pth", 64)
    several = {"weights": "net"} if wrapper == "beside small parts" else {}
    assert source.record() == {"file": "x.pth", "sha256": source.sha256, "format": "pth", "path": str(path), **several}


ONES, TWOS = ({"w": torch.full((4,), float(number))} for number in (1, 2))


@pytest.mark.parametrize(
    ("content", "by_default", "averaged"),
    [
        ({"state_dict": ONES, "state_dict_ema": TWOS}, "state_dict_ema", "state_dict_ema"),
        ({"model": ONES, "model_ema": TWOS}, "model_ema", "model_ema"),
        ({"model": ONES, "ema": {"state_dict": TWOS}}, "model", "ema.state_dict"),
        ({"params": ONES, "params_ema": TWOS}, "params", "params_ema"),
        ({"student": ONES, "teacher": TWOS}, "teacher", "teacher"),
        ({"run": {"net": ONES, "net_ema": {"module": TWOS}}}, "run.net", "run.net_ema.module"),
    ],
)
def test_of_several_sets_one_is_taken_and_said(tmp_path, caplog, content, by_default, averaged):
    torch.save(content, tmp_path / "x.pth")
    said = read_state_dict(tmp_path / "x.pth")[1].weights
    assert said == by_default and f"{by_default} is taken, not " in caplog.text
    raw, _ = read_state_dict(tmp_path / "x.pth", "raw")
    ema, source = read_state_dict(tmp_path / "x.pth", "ema")
    named, _ = read_state_dict(tmp_path / "x.pth", averaged)
    assert (raw["w"][0], ema["w"][0], named["w"][0]) == (1, 2, 2)
    assert source.record()["weights"] == averaged
    if averaged in ("state_dict_ema", "model_ema"):
        loaded = import_timm().models.load_state_dict(str(tmp_path / "x.pth"))
        assert torch.equal(loaded["w"], content[by_default]["w"]), "timm takes the same"


def test_what_is_no_file_is_said(tmp_path):
    refused(tmp_path / "no.pth", "no such checkpoint")
    refused(tmp_path, "directory")
    os.mkfifo(tmp_path / "pipe.pth")
    refused(tmp_path / "pipe.pth", "not a regular file")
    (tmp_path / "empty.pth").touch()
    refused(tmp_path / "empty.pth", "empty")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n<!DOCTYPE html><html><body>404</body>", "web page"),
        (b"<html>\xff", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b'{"message": "Not Found"}\n', "text file"),
        *(
            (other, "")
            for other in (bytes(1000), b"\x89PNG\r\n\x1a\n" + bytes(100), b"\x80", b"\x80\x02}", b"PK\x03\x04")
        ),
    ],
)
def test_what_is_no_checkpoint_is_recognised(tmp_path, content, words, suffix):
    (tmp_path / f"x{suffix}").write_bytes(content)
    refused(tmp_path / f"x{suffix}", words)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.99, "last byte"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_cut_file_is_refused_wherever_it_was_cut(tmp_path, kind, share):
    path = tmp_path / ("x.safetensors" if kind == "safetensors" else "x.pth")
    if kind == "safetensors":
        save_file(dict(STATE), path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: -1 if share == "last byte" else int(len(whole) * share)])
    refused(path, "cut short")


def test_a_flipped_bit_in_the_weights_is_refused(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(STATE, path)
    data = bytearray(path.read_bytes())
    data[data.find(STATE["a.weight"].numpy().tobytes()) + 4003] ^= 0x40
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["a.weight"], STATE["a.weight"]), "torch notices now"
    refused(path, "damaged", "Bad CRC-32")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("by_torch", [True, False])
def test_code_is_named_and_never_run(tmp_path, protocol, by_torch):
    path, witness = tmp_path / "x.pth", tmp_path / "witness"
    content = {"model": STATE, "extra": Bomb(witness)}
    if by_torch:
        torch.save(content, path, pickle_protocol=protocol)
    else:
        path.write_bytes(pickle.dumps({"extra": Bomb(witness)}, protocol=protocol))
    refused(path, "system", "refused")
    assert not witness.exists()
    pickle.loads(pickle.dumps(Bomb(witness)))
    assert witness.exists(), "the bomb of this test is a dud"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("size", [1, 5_000_000], ids=["small", "larger than the part that is read"])
def test_a_pickle_of_arrays_is_converted_by_the_line_in_its_message(tmp_path, monkeypatch, size):
    monkeypatch.chdir(tmp_path)
    arrays = {"backbone.bottom_up.norm0.weight": np.arange(size, dtype=np.float32)}
    path = tmp_path / "IN.pkl"
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "detectron2", "matching_heuristics": True}))
    with pytest.raises(SwinQuantError, match="if you trust it") as refused:
        read_state_dict(path)
    exec(str(refused.value).split("`")[1])
    state, _ = read_state_dict("OUT.pth")
    assert {name: x.numpy().tolist() for name, x in state.items()} == {name: x.tolist() for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"net": 3, "epoch": 1}, ["no tensors of a model", "net", "epoch"]),
        ({"optimizer": {"state": {0: {"step": torch.ones(1)}}}}, ["holds no tensors of a model"]),
        ({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, ["a, b could each be the model", "weights"]),
        ({}, ["no tensors"]),
        ({"model": {}}, ["no tensors"]),
        ([torch.ones(1)], ["list", "state_dict"]),
        (torch.ones(1), ["Tensor", "state_dict"]),
        ({"w": torch.eye(3).to_sparse()}, ["w", "sparse"]),
        ({"w": torch.ones(2, device="meta")}, ["w", "meta"]),
        ({1: torch.ones(1)}, ["1", "not the name"]),
        ({"line\nbreak": torch.ones(1)}, ["not the name"]),
        ({"\x1b[31mred": torch.ones(1)}, ["not the name"]),
    ],
)
def test_content_that_is_no_state_dict(tmp_path, content, words):
    torch.save(content, tmp_path / "x.pth")
    refused(tmp_path / "x.pth", *words)
