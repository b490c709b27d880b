"""A publisher's files beside the weights: honoured as transformers, timm and Microsoft's code mean them, or refused."""

import json
import logging
from argparse import Namespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import swin_quant as sq
from swin_quant.base.compat import import_timm
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import tell_once
from swin_quant.checkpoint.identify import config_for, config_given
from swin_quant.checkpoint.published import SETS
from swin_quant.config import to_dict
from swin_quant.config.load import value_at
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from tests.checkpoint.published import transformers
from tests.helpers.refusals import refused
from tests.helpers.settings import small_config as cfg_of

SIZES = {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
SWIN = SIZES | {"model_type": "swin", "image_size": 32, "id2label": {str(i): f"class {i}" for i in range(10)}}
SQUARE = {"height": 32, "width": 32}
VIT = {"image_processor_type": "ViTImageProcessor", "size": SQUARE}
ARGUMENTS = SIZES | {"img_size": 32}
TABLES = ("relative_position_index", "attn_mask", "relative_coords_table")


def trained(kind="swin", **keys):
    """A model in which every key affects the logits."""
    model = build_model(cfg_of(kind, **keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def bare(model):
    """Weights as timm and transformers write them: without tables."""
    return {key: value for key, value in model.state_dict().items() if not key.endswith(TABLES)}


def folder_of(folder, name="model.safetensors", model=None, **files):
    folder.mkdir(exist_ok=True)
    save_file(bare(model or trained()), folder / name)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder / name


def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 53, 3), np.uint8))


def prepared(file):
    return Preprocess.from_config(config_for(file))(picture())


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, "swin_quant")
    return caplog


PREPARED = {"input_size": [3, 32, 32], "crop_pct": 0.9, "interpolation": "bilinear"}
PRETRAINED = PREPARED | {"mean": [0.4] * 3, "std": [0.3] * 3, "num_classes": 10}
TIMMS = {"architecture": "swin_tiny_patch4_window7_224", "model_args": ARGUMENTS, "pretrained_cfg": PRETRAINED}


def by_transformers(words, processor=None, **config):
    return {"config": SWIN | config, "preprocessor_config": VIT | (processor or {})}, words


def by_timm(words, arguments=None, **pretrained):
    said = {"model_args": ARGUMENTS | (arguments or {}), "pretrained_cfg": PRETRAINED | pretrained}
    return {"config": TIMMS | said}, words


CUT = "and transformers may cut windows of such pictures"
REFUSED = [
    by_transformers("hidden_act is 'relu'", hidden_act="relu"),
    by_transformers("hidden_act is 'gelu_new'", hidden_act="gelu_new"),
    by_transformers("layer_norm_eps is 0.001", layer_norm_eps=1e-3),
    by_transformers("problem_type is 'multi_label_classification'", problem_type="multi_label_classification"),
    by_transformers("pictures are not resized so here: do_resize", {"do_resize": False}),
    by_transformers("do_pad is True", {"do_pad": True}),
    by_transformers("do_flip_channel_order is True", {"do_flip_channel_order": True}),
    by_transformers("pictures are not resized so here: do_resize", {"size": {"height": 32, "width": 64}}),
    by_transformers("pictures are not resized so here: do_resize", {"size": {"longest_edge": 32}}),
    by_transformers("pictures are not resized so here: do_resize", {"size": {"shortest_edge": 32}}),
    by_transformers(
        "pictures are not resized so here: do_resize", {"size": 32, "do_center_crop": True, "crop_size": 48}
    ),
    by_transformers("rescale_factor must be a positive number, not 0", {"rescale_factor": 0}),
    by_transformers("DATA.INTERPOLATION", {"resample": 9}),
    by_transformers("DATA.STD", {"image_std": [0, 0, 0]}),
    by_transformers("'PoolFormerImageProcessor' is no processor", {"image_processor_type": "PoolFormerImageProcessor"}),
    by_transformers("image_size gives DATA.IMG_SIZE 32", {"size": 64}),
    by_transformers("image_size is [32, 64]", image_size=[32, 64]),
    by_transformers("embed_dim gives MODEL.SWIN.EMBED_DIM 32, and the tensors tell 16", embed_dim=32),
    by_transformers("qkv_bias gives MODEL.SWIN.QKV_BIAS False, and the tensors tell True", qkv_bias=False),
    by_transformers("use_absolute_embeddings gives MODEL.SWIN.APE True", use_absolute_embeddings=True),
    by_transformers("window_size gives MODEL.SWIN.WINDOW_SIZE 8, and the tensors tell 4", window_size=8),
    by_transformers("id2label gives MODEL.NUM_CLASSES 1, and the tensors tell 10", id2label={"0": "cat"}),
    by_transformers("model_type gives MODEL.TYPE 'swinv2', and the tensors tell 'swin'", model_type="swinv2"),
    by_timm("crop_mode is 'border'", crop_mode="border"),
    by_timm("img_size gives DATA.IMG_SIZE 32, ", input_size=[3, 32, 64]),
    by_timm("label_offset is 1", label_offset=1),
    by_timm("model_args: act_layer is 'relu'", {"act_layer": "relu"}),
    by_timm("model_args: global_pool is 'max'", {"global_pool": "max"}),
    by_timm("WINDOW_SIZE", {"window_size": [4, 2]}),
    by_timm("model_args: always_partition is True", {"always_partition": True}),
    by_timm("DATA.MEAN must be a list", mean="red"),
    by_timm("CROP_RATIO must be a number", crop_pct={}),
    ({"config": {"architecture": "swin", "pretrained_cfg": PRETRAINED | {"input_size": 7}}}, "IMG_SIZE 7"),
    ({"config": TIMMS | {"model_args": 3, "pretrained_cfg": []}}, "config.json: pretrained_cfg must be a mapping"),
    ({"config": {"model_type": "swin", "image_size": "large"}}, "DATA.IMG_SIZE must be a whole number, not 'large'"),
    ({"config": {"model_type": "swin", "image_size": [32, 64]}}, f"image_size is [32, 64], {CUT}"),
    ({"config": {"model_type": "swin", "image_size": [448, 224]}}, f"image_size is [448, 224], {CUT}"),
    ({"config": {"model_type": "swin", "image_size": 10**9}}, "DATA.IMG_SIZE is 1000000000, but must be at least 1"),
    ({"config": b"{"}, "is not a description of a checkpoint: its JSON cannot be read"),
]


@pytest.mark.parametrize(("files", "words"), REFUSED)
def test_what_we_do_not_do_and_what_is_broken_is_refused_by_its_key(tmp_path, files, words):
    file = folder_of(tmp_path / "a", **files)
    refused(lambda: Preprocess.from_config(config_for(file)), words)


@pytest.mark.parametrize(
    ("processor", "overrides"),
    [
        ({"do_resize": False}, {"TEST.CROP": False}),
        ({"size": {"shortest_edge": 32}}, {"TEST.CROP": False}),
        ({"size": 64}, {"DATA.IMG_SIZE": 32}),
        ({"image_processor_type": "MyImageProcessor"}, {"TEST.CROP": "False"}),
    ],
)
def test_the_users_word_lifts_a_refusal(tmp_path, processor, overrides):
    file = folder_of(tmp_path / "a", config=SWIN, preprocessor_config=VIT | processor)
    cfg = config_for(file, overrides)
    assert (cfg.DATA.IMG_SIZE, cfg.TEST.CROP) == (32, False)


def test_what_lies_beside_a_file_of_another_name_is_its_own_if_it_fits(tmp_path, heard):
    said = {"config": SWIN, "preprocessor_config": VIT | {"do_normalize": False}}
    file = folder_of(tmp_path / "a", "renamed.safetensors", **said)
    assert config_for(file).DATA.MEAN == [0, 0, 0]
    file = folder_of(tmp_path / "b", "renamed.safetensors", **{**said, "config": SWIN | {"embed_dim": 32}})
    refused(lambda: config_for(file), "leave DATA.IMG_SIZE open", kind=UsageError)
    assert config_for(file, {"DATA.IMG_SIZE": 32}).DATA.MEAN == [0.485, 0.456, 0.406]
    assert "config.json: describes another model than renamed.safetensors is, and is left unread" in heard.text
    assert "embed_dim gives MODEL.SWIN.EMBED_DIM 32" in heard.text


def test_preprocessing_that_the_publisher_says_is_no_guess_and_is_told_once(tmp_path, heard):
    said = folder_of(tmp_path / "said", config=SWIN, preprocessor_config=VIT)
    config_for(said), config_for(said)
    assert heard.text.count("the configuration is its own") == 1 and "guess" not in heard.text
    silent = folder_of(tmp_path / "silent", config=SWIN)
    config_for(silent)
    said = "how pictures are prepared is a guess: TEST.CROP"
    warned = [record.getMessage() for record in heard.records if record.levelname == "WARNING"]
    assert said in warned[-1] and warned[-1].endswith("give config FILE if the training had one")
    beside = silent.with_suffix(".yaml")
    beside.write_text("MODEL: {NAME: a}\n")
    tell_once.cache_clear()
    config_for(silent)
    assert heard.messages[-1].endswith(f"config {beside} tells")


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"crop_mode": "squash"},
        {"crop_mode": "squash", "crop_pct": 1.0},
        {"crop_pct": 1.0},
        {"crop_pct": None},
        {"interpolation": "bicubic", "std": [0.1, 0.2, 0.3]},
    ],
)
@pytest.mark.parametrize("where", ["config.json", "all in one"])
def test_pictures_are_prepared_as_by_timm(tmp_path, said, where):
    pretrained = PRETRAINED | said
    apart, one = TIMMS | {"pretrained_cfg": pretrained}, {**TIMMS, **pretrained}
    del one["pretrained_cfg"]
    file = folder_of(tmp_path / "a", config=apart if where == "config.json" else one)
    data = import_timm().data
    theirs = data.create_transform(**data.resolve_data_config({}, pretrained_cfg=pretrained))
    assert torch.equal(prepared(file), theirs(picture()))


def made_by_timm(folder, name, arguments, **pretrained):
    """A model of timm, and its file of another name than a repository's, with its description beside it."""
    theirs = import_timm().create_model(name, **arguments, num_classes=10).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder.mkdir()
    save_file({k: v for k, v in theirs.state_dict().items() if not k.endswith(TABLES)}, folder / "mine.safetensors")
    said = {"architecture": name, "model_args": arguments, "pretrained_cfg": PRETRAINED | pretrained}
    (folder / "config.json").write_text(json.dumps(said | {"num_classes": 10}))
    return theirs, folder / "mine.safetensors"


@torch.no_grad()
@pytest.mark.parametrize("more", [{}, {"window_size": 4, "pretrained_window_sizes": (6, 6)}])
def test_a_model_of_timm_has_its_logits(tmp_path, more):
    """No tensor tells V2's windows: they come from the builder's arguments, or from its architecture."""
    sizes = {"patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "img_size": 32}
    theirs, file = made_by_timm(tmp_path / "a", "swinv2_tiny_window8_256", sizes | more)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(sq.load(file)(images), theirs(images), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_model_of_timm_is_built_with_its_options_whatever_its_file_is_called(tmp_path):
    options = {"depth": 2, "img_size": 32}
    theirs, file = made_by_timm(tmp_path / "a", "vit_tiny_patch16_224", options, crop_mode="squash")
    images = torch.randn(2, 3, 32, 32)
    for config in (None, config_given("timm:vit_tiny_patch16_224", file, overrides={"MODEL.NUM_CLASSES": 10})):
        ours = sq.load(file, config)
        assert ours.config.TEST.SHAPE == "squashed" and ours.config.DATA.MEAN == [0.4] * 3
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interpolation", ["bilinear", ""])
def test_a_file_of_timms_training_script_says_how_it_was_validated(tmp_path, interpolation):
    """`--interpolation` is "" by default there, which means the model's own."""
    sizes = ARGUMENTS | {"img_size": None}
    given = {"img_size": 32, "mean": [0.1] * 3, "interpolation": interpolation, "num_classes": 10, "lr": 0.1}
    absent = dict.fromkeys(("input_size", "crop_pct", "std"))
    args = Namespace(model="swin_tiny_patch4_window7_224", model_kwargs=sizes, **given, **absent)
    torch.save({"epoch": 3, "arch": args.model, "state_dict": bare(trained()), "args": args}, tmp_path / "last.pth.tar")
    data = import_timm().data
    own = {"mean": (0.1, 0.1, 0.1), "input_size": (3, 32, 32)}
    own |= {"interpolation": interpolation} if interpolation else {}
    usual = import_timm().get_pretrained_cfg(args.model).to_dict()
    theirs = data.create_transform(**data.resolve_data_config(own, pretrained_cfg=usual))
    assert torch.equal(prepared(tmp_path / "last.pth.tar"), theirs(picture()))


def pickled(file, model, config):
    torch.save({"model": bare(model), "config": config}, file)
    return file


def tree(kind, **keys):
    """Microsoft's tree of a model, as plain dictionaries."""
    return to_dict(cfg_of(kind, **keys)) | {"FUSED_LAYERNORM": False}


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("swin", "QK_SCALE", 0.3), ("swinv2", "PRETRAINED_WINDOW_SIZES", [6, 6]), ("swinv2", "WINDOW_SIZE", 8)],
)
@pytest.mark.parametrize("given", [False, True])
def test_a_pickled_config_is_the_model_that_is_built(tmp_path, kind, key, value, given):
    model = trained(kind, **{key: value})
    file = pickled(tmp_path / "x.pth", model, tree(kind, **{key: value}))
    left_open = to_dict(cfg_of(kind))
    del left_open["MODEL"][kind.upper()][key]
    (tmp_path / "own.json").write_text(json.dumps(left_open))
    (tmp_path / "own.yaml").write_text(json.dumps(left_open))  # JSON is YAML
    images = torch.randn(2, 3, 32, 32)
    loaded = sq.load(file, tmp_path / "own.yaml") if given else sq.load(file)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def test_a_configuration_of_another_model_than_is_published_is_refused(tmp_path, heard):
    file = pickled(tmp_path / "x.pth", trained(QK_SCALE=0.3), tree("swin", QK_SCALE=0.3))
    other = cfg_of("swin", QK_SCALE=0.5)
    (tmp_path / "own.yaml").write_text(json.dumps(to_dict(other)))
    for config in (other, tmp_path / "own.yaml"):
        with pytest.raises(UsageError, match=r"config: qk_scale gives MODEL.SWIN.QK_SCALE 0.3, and the configuration"):
            sq.load(file, config)
    assert config_for(file, {"MODEL.SWIN.QK_SCALE": 0.5}).MODEL.SWIN.QK_SCALE == 0.5, "the user's word is last"


def test_a_configuration_that_prepares_otherwise_is_the_users_word_and_a_warning(tmp_path, heard):
    file = folder_of(tmp_path / "a", config=SWIN, preprocessor_config=VIT | {"do_normalize": False})
    (tmp_path / "own.yaml").write_text(json.dumps({**to_dict(cfg_of()), "DATA": {"IMG_SIZE": 32, "STD": [0.2] * 3}}))
    cfg = sq.load(file, tmp_path / "own.yaml").config
    assert cfg.DATA.STD == [0.2] * 3 and cfg.DATA.MEAN == [0, 0, 0]
    assert "config.json gives DATA.STD [1.0, 1.0, 1.0], and the configuration [0.2, 0.2, 0.2]" in heard.text
    assert "DATA.MEAN [0.0, 0.0, 0.0]" in heard.text, "what the configuration leaves open is said, too"


def test_tables_set_keys_of_our_tree():
    for place in SETS.values():
        kind = "SWINV2" if "PRETRAINED" in place else "SWIN"
        value_at(cfg_of(kind.lower()), place.format(node=f"MODEL.{kind}"))


FRAMES = [
    ("ViT", {"size": SQUARE}),
    ("DeiT", {"size": {"height": 40, "width": 40}, "crop_size": 32}),
    ("Bit", {"size": {"shortest_edge": 40}, "crop_size": SQUARE}),
    ("Bit", {"size": {"shortest_edge": 37}, "crop_size": 32}),
    ("Bit", {"size": 32, "crop_size": 32}),
]
LEVELS = [
    {"do_normalize": False},
    {"do_rescale": False},
    {"do_rescale": False, "do_normalize": False},
    {"do_rescale": False, "image_mean": [100, 110, 120.0], "image_std": [50.0] * 3},
    {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
    {"rescale_factor": 1 / 128, "do_normalize": False},
    {"rescale_factor": 0.00392156862745098},
    *({"resample": number} for number in range(4)),
]


@pytest.mark.parametrize(
    ("name", "frame", "said"), [*((*one, {}) for one in FRAMES), *((*FRAMES[0], said) for said in LEVELS)]
)
def test_pictures_are_prepared_as_by_the_processor(tmp_path, name, frame, said):
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**frame, **said)
    file = folder_of(tmp_path / "a", config=SWIN)
    processor.save_pretrained(file.parent)
    expected = processor(picture(), return_tensors="pt")["pixel_values"][0].float()
    torch.testing.assert_close(prepared(file), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "same"),
    [
        (VIT | {"image_processor_type": "ViTImageProcessorFast", "size": 32}, VIT),
        (VIT | {"image_mean": 0.25}, VIT | {"image_mean": [0.25] * 3}),
    ],
)
def test_other_words_of_a_processor_mean_the_same(tmp_path, said, same):
    one, other = (
        folder_of(tmp_path / str(n), config=SWIN, preprocessor_config=each) for n, each in enumerate((said, same))
    )
    assert torch.equal(prepared(one), prepared(other))
