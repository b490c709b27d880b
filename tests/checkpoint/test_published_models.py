"""Every published Swin is identified by names and shapes, whatever wraps it; one of each kind gives its outputs. Other
files of publishers' libraries are refused in one line."""

import json
import re

import pytest
import torch
import yaml
from nightly import share
from torch import nn
from torch.nn.utils import parametrizations, prune

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint.identify import config_for, config_given
from swin_quant.checkpoint.opened import Source, choose_state, named_weights
from swin_quant.config import architecture
from tests.checkpoint import published
from tests.checkpoint.published import timm, torchvision, transformers

CLASSES = (37, 0)  # beside the published number
KINDS = {  # publisher, as in docs/checkpoints.md -> the names of its models, and the function that makes one
    "Microsoft": (published.MICROSOFT, published.of_microsoft),
    "Microsoft's code at other sizes": (published.RESIZED, published.of_microsoft),
    "timm": ([name for name in published.TIMM if name not in published.S3], published.of_timm),
    "transformers": (published.TRANSFORMERS, published.of_transformers),
}
BACKBONES = {
    "mmpretrain": (published.MICROSOFT, published.of_openmmlab),
    "mmdetection, mmsegmentation": (published.V1, lambda name: published.of_openmmlab(name, (0, 1, 2, 3))),
    "detectron2": (published.V1, published.of_detectron2),
    "SimMIM": (["swin_base_patch4_window6_192", "swinv2_base_patch4_window12_192"], published.of_microsoft),
}


ONE_IN = {"Microsoft's code at other sizes": 4, "mmdetection, mmsegmentation": 3, "detectron2": 3}  # runs in CI


def cases(kinds):
    return [one for kind in kinds for one in share([(kind, name) for name in kinds[kind][0]], ONE_IN.get(kind, 1))]


def under(prefix):
    return lambda state: {prefix + key: value for key, value in state.items()}


def beside_raw(state):
    raw = {key: torch.empty_like(value) for key, value in state.items()}
    return {"epoch": 3, "state_dict": raw, "state_dict_ema": state, "optimizer": {"state": {}}}


WRAPPERS = {
    "bare": dict,
    "`module.`": under("module."),
    "`model.`": under("model."),
    "`_orig_mod.`": under("_orig_mod."),
    "`state_dict` with EMA": beside_raw,
    "`state_dict` of a wrapper with EMA": lambda state: beside_raw(under("module._orig_mod.")(state)),
}


def opened(content, file):
    """What `open_checkpoint` makes of a file with this content."""
    return published.opened(file, named_weights(*choose_state(content, Source(file, "", "pth"))))


def wrappers_for(name):
    """All for the smallest models of a publisher: a size changes no name."""
    return [*WRAPPERS.values()] if "tiny" in name or "_window6_" in name else [dict]


def facts(cfg, geometry):
    found = {"TYPE": cfg.MODEL.TYPE, "IMG_SIZE": cfg.DATA.IMG_SIZE, **architecture(cfg)}
    return {key: found[key] for key in geometry if key != "NUM_CLASSES"}


def without_classes(geometry):
    return {key: value for key, value in geometry.items() if key != "NUM_CLASSES"}


@pytest.mark.parametrize(("kind", "name"), cases(KINDS))
def test_a_classifier_is_identified_whatever_wraps_it(kind, name, tmp_path):
    model = KINDS[kind][1](name)
    for classes in (model.geometry["NUM_CLASSES"], *CLASSES):
        state, file = model.with_classes(classes), model.written(tmp_path, classes)
        overrides = {} if classes else {"MODEL.OUTPUT_KIND": "embedding"}
        bare = opened(state, file)
        cfg = config_for(bare, overrides)
        assert facts(cfg, model.geometry) == without_classes(model.geometry)
        assert not classes or classes == cfg.MODEL.NUM_CLASSES
        if kind == "Microsoft" and classes == model.geometry["NUM_CLASSES"]:
            assert name == cfg.MODEL.NAME
        for wrap in wrappers_for(name) if classes in CLASSES else ():  # a number of classes changes no name
            found, expected = opened(wrap(state), file).weights().state, bare.weights().state
            assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in expected.items()}
            assert all(found[key] is x for key, x in expected.items() if ".qkv." not in key)


HEADS = {
    "mmpretrain": ("backbone.", ("neck.w", "head.fc.weight"), "mmpretrain"),
    "mmdetection, mmsegmentation": ("backbone.", ("neck.fpn.w", "bbox_head.w"), "detection"),
    "detectron2": ("backbone.bottom_up.", ("roi_heads.w",), "detection"),
    "SimMIM": ("encoder.", ("encoder.mask_token", "decoder.0.weight"), "timm"),
}


@pytest.mark.parametrize(("kind", "name"), cases(BACKBONES))
def test_a_backbone_is_identified_and_refused_as_a_classifier(kind, name, tmp_path):
    model, (prefix, beside, windows) = BACKBONES[kind][1](name), HEADS[kind]
    state = under(prefix)(model.with_classes(0)) | {key: torch.empty(2, 2) for key in beside}
    file = model.written(tmp_path, 0)
    for wrap in (*wrappers_for(name), lambda state: {"model": state}):
        checkpoint = opened(wrap(state), file)
        cfg = config_for(checkpoint, {"MODEL.OUTPUT_KIND": "features"})
        assert facts(cfg, model.geometry) == without_classes(model.geometry)
        assert cfg.MODEL.FEATURES.WINDOWS == windows
        with pytest.raises(SwinQuantError, match="no Swin classifier .*its maps by output_kind features"):
            config_for(checkpoint)


@pytest.mark.parametrize("name", published.S3 + published.CR)
def test_the_models_that_timm_alone_has_are_timm_s(name, tmp_path):
    model = published.Published("timm", name, published.timm_state(name))
    for classes in (1000, 37):
        state, file = model.with_classes(classes), model.written(tmp_path, classes)
        for wrap in wrappers_for(name):
            checkpoint = opened(wrap(state), file)
            cfg = config_given(f"timm:{name}", checkpoint)
            assert (cfg.MODEL.TYPE, cfg.MODEL.NUM_CLASSES) == ("timm", classes)
            assert name.partition(".")[0] == cfg.MODEL.TIMM.ARCHITECTURE
        if name.startswith("swin_s3_small"):  # windows of 14, 14, 14 and 7: a plain Swin, whose last map has 7
            assert config_for(checkpoint).MODEL.SWIN.WINDOW_SIZE == 14
            continue
        with pytest.raises(SwinQuantError, match=r"Swin-S3: not supported|else give config timm:NAME"):
            config_for(checkpoint)


@pytest.mark.parametrize("name", published.TORCHVISION)
def test_the_models_of_torchvision_are_refused_with_the_way(name, tmp_path):
    with published.Shapes():
        state = torchvision.models.get_model(name, weights=None).state_dict()
    model = published.Published("torchvision", name, state)
    way = "no Swin classifier .*`sq.wrap`"
    for wrap in WRAPPERS.values():
        with pytest.raises(SwinQuantError, match=way):
            config_for(opened(wrap(state), model.written(tmp_path, 0)))


def randomised(model):
    torch.manual_seed(0)
    for value in model.parameters():
        value.data += 0.05 * torch.randn_like(value)
    model.eval()  # mmpretrain's returns nothing
    return model


def is_close(found, expected):
    return (found - expected).abs().max() < 1e-4 * expected.abs().max()


V1, V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"


@pytest.fixture
def load(tmp_path):
    """load(state or model of transformers, ...) -> the model that `sq.load` makes of its file or folder."""

    def load(given, file="x.pth", **how):
        if isinstance(given, transformers.PreTrainedModel):
            given.save_pretrained(tmp_path)
            return sq.load(tmp_path, **how)
        torch.save(given, tmp_path / file)
        return sq.load(tmp_path / file, **how)

    return load


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kind"),
    share([(V1, "Microsoft"), (V1, "timm"), (V1, "Lightning"), (V2, "timm"), (V2, "Microsoft"), (V2, "Lightning")], 3),
)
def test_a_classifier_gives_its_publisher_s_logits(kind, name, load):
    model = randomised(timm.create_model(name, num_classes=37))
    state = model.state_dict() if kind == "timm" else published.microsoft_names(model.state_dict())
    state = {"state_dict": under("model.")(state), "epoch": 3} if kind == "Lightning" else state
    loaded = load(state, f"{name}.pth")
    images = torch.randn(2, 3, *[loaded.config.DATA.IMG_SIZE] * 2)
    assert loaded.config.MODEL.TYPE == name.split("_")[0] and is_close(loaded.module(images), model(images))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "in_memory"), share([("Swin", True), ("Swinv2", True), ("Swinv2", False), ("Swin", False)], 2)
)
def test_a_folder_of_transformers_gives_its_logits(kind, in_memory, tmp_path):
    sizes = {"image_size": 256, "window_size": 16, "pretrained_window_sizes": [12, 12, 12, 6]}
    config = getattr(transformers, f"{kind}Config")(num_labels=37, **(sizes if kind == "Swinv2" else {}))
    model = randomised(getattr(transformers, f"{kind}ForImageClassification")(config))
    model.save_pretrained(tmp_path)
    if in_memory:  # V1's names differ there
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    images = torch.randn(1, 3, config.image_size, config.image_size)
    assert is_close(sq.load(tmp_path).module(images), model(images).logits)


@torch.no_grad()
def test_a_model_of_timm_takes_the_names_of_another_publisher(load, tmp_path):
    """`models/test_timm` has timm's own names. At the published widths and windows, a block a stage."""
    depths = {"depths": (1, 1, 1, 1)}
    model = randomised(timm.create_model(V1, num_classes=37, **depths))
    images = torch.randn(1, 3, 224, 224)
    state = under("module.")(published.microsoft_names(model.state_dict()))
    given = {"ARCHITECTURE": V1, "OPTIONS": json.dumps(depths)}
    config = {"DATA": {"IMG_SIZE": 224}, "MODEL": {"TYPE": "timm", "NAME": V1, "NUM_CLASSES": 37, "TIMM": given}}
    (tmp_path / "timm.yaml").write_text(yaml.safe_dump(config))
    assert is_close(load({"state_dict": state}, config=tmp_path / "timm.yaml").module(images), model(images))


@torch.no_grad()
def test_weights_chooses_among_the_encoders_of_moby(tmp_path):
    """Its file holds an encoder, and the average of it, `encoder_k`."""
    models = {prefix: randomised(timm.create_model(V1, num_classes=0)) for prefix in ("encoder.", "encoder_k.")}
    models["encoder_k."].layers[0].blocks[0].mlp.fc2.weight.data += 1
    state = {"queue1": torch.ones(256, 8)}
    for prefix, model in models.items():
        state |= under(prefix)(published.microsoft_names(model.state_dict()))
    images = torch.randn(1, 3, 224, 224)
    torch.save({"model": state}, file := tmp_path / "x.pth")
    for prefix, model in models.items():
        loaded = sq.load(file, output_kind="embedding", weights=prefix[:-1])
        assert is_close(loaded.module(images), model(images))
        maps = sq.load(file, output_kind="features", weights=prefix[:-1]).module(images)
        assert is_close(maps[0], model.layers[0](model.patch_embed(images)).permute(0, 3, 1, 2))
    for kind in ("embedding", "features"):
        with pytest.raises(SwinQuantError, match="encoder, encoder_k could each be the model: choose one by weights"):
            sq.load(file, output_kind=kind)


@torch.no_grad()
def test_a_backbone_of_detectron2_gives_the_maps_of_its_stages(load):
    """Its code pads and always shifts; at 224 pixels with four whole windows a map, timm's stages compute the same."""
    model = randomised(timm.create_model(V1, img_size=448))
    state = published.microsoft_names(model.state_dict())
    state = {key: value for key, value in state.items() if not key.startswith(("norm.", "head."))}
    x, maps = model.patch_embed(images := torch.randn(1, 3, 448, 448)), []
    for stage, layer in enumerate(model.layers):
        x, width = layer(x), 96 << stage
        norm = {"weight": torch.rand(width) + 0.5, "bias": torch.randn(width)}
        state |= {f"norm{stage}.{key}": value for key, value in norm.items()}
        maps.append(torch.nn.functional.layer_norm(x, (width,), **norm).permute(0, 3, 1, 2))
    content = {"model": under("backbone.bottom_up.")(state) | {"roi_heads.w": torch.ones(1)}}
    found = load(content, output_kind="features").module(images)
    assert all(is_close(one, other) for one, other in zip(found, maps, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", share(["Swin", "Swinv2"], 2))
def test_a_swin_of_masked_image_modelling_gives_its_embedding(load, kind):
    sizes = {"image_size": 256, "window_size": 8} if kind == "Swinv2" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForMaskedImageModeling")(config).eval()
    images = torch.randn(1, 3, config.image_size, config.image_size)
    expected = getattr(model, kind.lower())(images).last_hidden_state.mean(1)
    assert is_close(load(model, output_kind="embedding").module(images), expected)
    assert len(load(model, output_kind="features").module(images)) == 4


@torch.no_grad()
def test_the_last_norm_of_a_backbone_is_that_of_its_embedding(load):
    model = timm.create_model(V1).eval()
    state = published.microsoft_names(model.state_dict())
    state = {re.sub("^norm", "norm3", key): value for key, value in state.items() if not key.startswith("head.")}
    images = torch.randn(1, 3, 224, 224)
    expected = model.forward_head(model.forward_features(images), pre_logits=True)
    assert is_close(load(under("backbone.")(state), output_kind="embedding").module(images), expected)


def swin(change):
    """timm's Swin-T, a block a stage, after `change` of each linear layer: its state_dict."""
    model = timm.create_model(V1, depths=(1, 1, 1, 1))
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        change(layer)
    return model.state_dict()


def with_lora(state):
    """The keys that PEFT writes: adapters, beside the weights of their layers."""
    adapters = {f"base_model.model.{k[:-7]}.lora_A.default.weight": v for k, v in state.items() if "qkv.weight" in k}
    return adapters | {f"base_model.model.{k.replace('qkv.', 'qkv.base_layer.')}": v for k, v in state.items()}


def detr():
    backbone = transformers.SwinConfig(out_features=["stage4"])
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        encoder_layers=1,
        decoder_layers=1,
    )
    return transformers.DetrForObjectDetection(config)


def of_smp():
    """As `segmentation_models_pytorch` names the parts of a network with timm's backbone."""
    backbone = timm.create_model(V1, features_only=True)
    return nn.ModuleDict({"encoder": nn.ModuleDict({"model": backbone}), "segmentation_head": nn.Conv2d(8, 2, 3)})


CHANGED = r"no Swin classifier .its keys are .*(weight_|parametrizations|lora_|base_layer).*module to .sq\.wrap"
OTHER = r"no Swin classifier .*features.*sq\.wrap"
REFUSED = {
    "pruned": (lambda: swin(lambda one: prune.l1_unstructured(one, "weight", 0.3)), CHANGED),
    "weight norm": (lambda: swin(nn.utils.weight_norm), CHANGED),
    "spectral norm": (lambda: swin(nn.utils.spectral_norm), CHANGED),
    "parametrized": (lambda: swin(parametrizations.weight_norm), CHANGED),
    "LoRA": (lambda: with_lora(swin(id)), CHANGED),
    "Swin2SR": (lambda: transformers.Swin2SRForImageSuperResolution(transformers.Swin2SRConfig()).state_dict(), OTHER),
    "Donut": (lambda: transformers.DonutSwinForImageClassification(transformers.DonutSwinConfig()).state_dict(), OTHER),
    "DETR": (lambda: detr().state_dict(), OTHER),
    "segmentation_models": (lambda: of_smp().state_dict(), OTHER),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_kind_and_the_way(load, name):
    make, says = REFUSED[name]
    with pytest.raises(SwinQuantError, match=says) as refusal:
        load(make())
    assert "damaged" not in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("make", [detr, of_smp])
def test_the_backbone_of_a_larger_model_opens_with_features(load, make):
    model = load(make().state_dict(), output_kind="features")
    assert model.name == V1 and len(model.module(torch.randn(1, 3, 224, 224))) >= 1
