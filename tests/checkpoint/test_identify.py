"""A checkpoint's configuration from its keys and shapes: the built one is found, or one line says why not."""

import functools
import logging
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import Source, load_float, save_calibrated, save_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.checkpoint.opened import Weights
from swin_quant.config import architecture, from_dict, load_config, to_dict
from swin_quant.config.load import shipped_configs
from swin_quant.models import build_model
from swin_quant.models.maps import offset_coordinates
from swin_quant.quant.quantizer import named_nodes
from tests.checkpoint.published import opened as as_read
from tests.helpers.refusals import refused
from tests.helpers.settings import small_config as config

SHIPPED = shipped_configs()
TABLES = ("relative_position_index", "attn_mask", "relative_coords_table")


def on_meta(cfg):
    """The state_dict of a model, only shapes, except the coordinates, whose values tell the pretrained window."""
    with torch.device("meta"):
        model = build_model(cfg)
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_amax")}
    for key in [key for key in state if key.endswith("relative_coords_table")]:
        pretrained = architecture(cfg).PRETRAINED_WINDOW_SIZES[int(key.split(".")[1])]
        state[key] = offset_coordinates(((state[key].shape[1] + 1) // 2,) * 2, pretrained)
    return state


@functools.cache
def shipped(name):
    cfg = load_config(SHIPPED[name])
    return cfg, on_meta(cfg)


def bare(state):
    return {key: value for key, value in state.items() if not key.endswith(TABLES)}


@pytest.fixture
def weights(tmp_path):
    """weights(state, name) -> as if read from a file of that name, which is as large as any real one."""

    def make(state, name="mine.pth"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 4 << 30)  # takes no disk
        return as_read(tmp_path / name, Weights(state, Source(tmp_path / name, "0" * 64, "pth")))

    return make


def same_model(one, other):
    return (
        one.MODEL.TYPE == other.MODEL.TYPE
        and architecture(one) == architecture(other)
        and one.MODEL.NUM_CLASSES == other.MODEL.NUM_CLASSES
        and one.DATA.IMG_SIZE == other.DATA.IMG_SIZE
    )


def test_v2_without_tables_is_ambiguous_and_the_candidates_are_named(weights):
    state = bare(shipped("swinv2_base_patch4_window8_256")[1])
    windows = ("window8_256", "window16_256", "window12to16_192to256_22kto1k_ft", "window12to24_192to384_22kto1k_ft")
    words = ("IMG_SIZE, PRETRAINED_WINDOW_SIZES, WINDOW_SIZE", "config NAME")
    names = (f"swinv2_base_patch4_{window}" for window in windows)
    message = refused(lambda: config_for(weights(state)), *words, *names, kind=UsageError)
    assert "22k," not in message, "another head"


def test_timms_cache_tells_the_window_by_its_name_and_the_preparation(weights, tmp_path, caplog):
    caplog.set_level(logging.INFO, "swin_quant")
    cfg, state = shipped("swinv2_tiny_patch4_window16_256")
    name = "models--timm--swinv2_tiny_window16_256.ms_in1k/snapshots/abc/model.safetensors"
    (tmp_path / name).parent.mkdir(parents=True)
    found = config_for(weights(bare(state), name))
    assert same_model(found, cfg) and found.MODEL.NAME == cfg.MODEL.NAME
    assert (found.TEST.CROP, found.TEST.CROP_RATIO, found.DATA.INTERPOLATION) == (True, 0.9, "bicubic")
    assert "WINDOW_SIZE 16, PRETRAINED_WINDOW_SIZES [0, 0, 0, 0] from there, since no tensor shows it" in caplog.text


def test_the_user_decides_what_the_file_leaves_open(weights):
    state = bare(shipped("swinv2_tiny_patch4_window8_256")[1])
    for window in (8, 16):
        found = config_for(weights(state), {"MODEL.SWINV2.WINDOW_SIZE": window})
        assert found.MODEL.NAME == f"swinv2_tiny_patch4_window{window}_256"
    found = config_for(weights(state), {"MODEL.SWINV2.WINDOW_SIZE": "12", "DATA.IMG_SIZE": "384"})
    assert (found.MODEL.SWINV2.WINDOW_SIZE, found.DATA.IMG_SIZE) == (12, 384)
    assert found.MODEL.SWINV2.EMBED_DIM == 96


def test_a_geometry_of_its_own_says_so(weights, caplog):
    cfg = config("swin", DEPTHS=[2, 4], WINDOW_SIZE=8)
    caplog.set_level(logging.INFO, "swin_quant")
    found = config_for(weights(on_meta(cfg), "own.v2_calib.pth"))
    assert same_model(found, cfg) and found.MODEL.NAME == "own.v2"
    assert "no shipped configuration fits" in caplog.text and "TEST.CROP" in caplog.text


def test_a_geometry_of_its_own_without_a_size_asks_for_it(weights):
    tiny = {"PATCH_SIZE": 4, "EMBED_DIM": 96, "NUM_HEADS": [3, 6, 12, 24], "WINDOW_SIZE": 7}
    cfg = config("swin", image=448, DEPTHS=[2, 2, 8, 2], **tiny)
    state = bare(on_meta(cfg))
    words = ("DATA.IMG_SIZE open", "no shipped configuration fits", "config NAME")
    refused(lambda: config_for(weights(state)), *words, kind=UsageError)
    assert same_model(config_for(weights(state), {"DATA.IMG_SIZE": 448}), cfg)


def test_a_file_without_a_head_asks_for_the_classes(weights):
    cfg = config()
    state = {key: value for key, value in on_meta(cfg).items() if not key.startswith("head.")}
    refused(lambda: config_for(weights(state)), "has no head: set MODEL.NUM_CLASSES", kind=UsageError)
    assert config_for(weights(state), {"MODEL.NUM_CLASSES": 5}).MODEL.NUM_CLASSES == 5


@pytest.mark.parametrize("lost", ["patch_embed.proj.weight", "layers.0.blocks.0.mlp.fc1.weight"])
def test_a_file_that_lost_a_tensor_is_damaged(lost, weights):
    state = {key: value for key, value in on_meta(config()).items() if not key.startswith(lost)}
    refused(lambda: config_for(weights(state)), "damaged checkpoint of a Swin: no tensor tells")


@pytest.mark.parametrize("value", [0.0, 1e-22, 1e30, float("nan"), float("inf"), -1.0])
def test_coordinates_without_meaning_are_no_arithmetic(value, weights):
    state = on_meta(config("swinv2"))
    for key in [key for key in state if key.endswith("relative_coords_table")]:
        state[key] = torch.full_like(state[key], value)
    assert config_for(weights(state)).MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [0, 0]


@st.composite
def geometries(draw):
    """A small model that can be built: map, window and depth of each stage, with the config's other keys."""
    kind, stages = draw(st.sampled_from(["swin", "swinv2"])), draw(st.integers(1, 3))
    window, patch = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    side = window * draw(st.integers(1, 2)) * 2 ** draw(st.integers(0, 1)) * 2 ** (stages - 1)
    keys = {
        "PATCH_SIZE": patch,
        "IN_CHANS": draw(st.integers(1, 4)),
        "EMBED_DIM": 8 * draw(st.integers(1, 3)),
        "DEPTHS": draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
        "NUM_HEADS": draw(st.lists(st.sampled_from([1, 2, 4]), min_size=stages, max_size=stages)),
        "WINDOW_SIZE": draw(st.sampled_from([window, side])),
        "MLP_RATIO": draw(st.floats(0.5, 5)),
        "QKV_BIAS": draw(st.booleans()),
        "APE": draw(st.booleans()),
        "PATCH_NORM": draw(st.booleans()),
    }
    if kind == "swinv2":
        keys["PRETRAINED_WINDOW_SIZES"] = [draw(st.sampled_from([0, 5, 6]))] * stages
    return config(kind, image=side * patch, classes=draw(st.integers(1, 5)), **keys)


@settings(max_examples=12)
@given(cfg=geometries(), container=st.sampled_from(["pth", "safetensors", "calibrated"]))
def test_what_was_built_is_found_and_loads(tmp_path_factory, cfg, container):
    model, folder = build_model(cfg), tmp_path_factory.mktemp("built")
    file = folder / ("x.safetensors" if container == "safetensors" else "x.pth")
    if container == "calibrated":
        for node in named_nodes(model).values():
            node.amax = torch.tensor(1.0)
        save_calibrated(model, file)
    else:
        save_float(model, file)
    shifted = any(key.endswith("attn_mask") for key in model.state_dict())
    clipped = architecture(cfg).WINDOW_SIZE > model.geometry.resolution(len(model.layers) - 1)
    told = shifted or clipped or cfg.MODEL[cfg.MODEL.TYPE.upper()].APE
    found = config_for(file, None if told else {"DATA.IMG_SIZE": cfg.DATA.IMG_SIZE})
    assert found.DATA.IMG_SIZE == cfg.DATA.IMG_SIZE
    ours, theirs = architecture(found), architecture(cfg)
    same = {key for key in theirs if ours[key] == theirs[key]}
    assert set(theirs) - same <= {"MLP_RATIO", "PRETRAINED_WINDOW_SIZES"}, "equal but in how they are written"
    again = build_model(found)
    load_float(again, file)
    pictures = torch.randn(1, theirs.IN_CHANS, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE)
    with torch.no_grad():
        assert torch.equal(again(pictures), model(pictures))


MICRO = {kind: on_meta(config(kind)) for kind in ("swin", "swinv2")}
CHANGES = st.tuples(
    st.sampled_from(["drop", "shape", "rename"]),
    st.sampled_from(sorted({key for state in MICRO.values() for key in state})),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 5000), max_size=4),
)


@settings(max_examples=60)
@given(kind=st.sampled_from(sorted(MICRO)), changes=st.lists(CHANGES, min_size=1, max_size=4))
def test_whatever_a_file_holds_the_answer_is_a_config_or_one_line(tmp_path_factory, kind, changes):
    file, state = tmp_path_factory.getbasetemp() / "some.pth", dict(MICRO[kind])
    file.write_bytes(b"x" * 100_000)
    for change, key, number, shape in changes:
        if change == "drop":
            state = {name: value for name, value in state.items() if not name.startswith(key.rpartition(".")[0])}
        elif change == "shape":
            is_read = key.endswith("coords_table")
            state[key] = torch.zeros([n % 9 for n in shape]) if is_read else torch.empty(shape, device="meta")
        else:
            state[key.replace("0", str(number))] = torch.ones(2)
    try:
        config_for(as_read(file, Weights(state, Source(file, "0" * 64, "pth"))))
    except SwinQuantError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500


def test_the_card_beside_it_comes_first(tmp_path):
    file, cfg = tmp_path / "x.pth", from_dict(to_dict(config()), "test", {"TEST.CROP": False})
    save_float(build_model(cfg), file)
    record = {"file": file.name, "sha256": compute_sha256(file)}
    RunCard("x", to_dict(cfg), {}, checkpoint=record).write(file.with_suffix(".json"))
    assert config_for(file).TEST.CROP is False, "the card's, which no tensor tells"
    assert config_for(file, {"DATA.BATCH_SIZE": 3}).DATA.BATCH_SIZE == 3
    file.with_suffix(".json").unlink()
    assert config_for(file).TEST.CROP is True


WAYS = "a Swin inside it gives its maps by output_kind features; else give config timm:NAME, or its module to `sq.wrap`"


@pytest.mark.parametrize(
    "keys",
    [
        ["conv_first.weight", "layers.0.residual_group.blocks.0.attn.qkv.weight"],
        ["backbone.stages.0.blocks.0.attn.w_msa.qkv.weight", "head.fc.weight"],
        ["backbone.anything.weight", "module.bbox_head.fc.weight"],
        ["base.lora_A.weight", "base.lora_B.weight"],
    ],
)
def test_other_models_are_shown_by_their_keys(keys, tmp_path):
    torch.save({key: torch.zeros(1) for key in keys}, tmp_path / "x.pth")
    with pytest.raises(SwinQuantError) as refusal:
        config_for(tmp_path / "x.pth")
    assert str(refusal.value).endswith(f"is no Swin classifier (its keys are {', '.join(keys)}): {WAYS}")
