"""Files of published sizes that publishers' own libraries write: opened with their outputs, or refused in one line."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, prune

import swin_quant as sq
from tests.checkpoint.published import microsoft_names as microsoft
from tests.checkpoint.published import timm, transformers

pytestmark = pytest.mark.slow
NAME = "swin_tiny_patch4_window7_224"


@pytest.fixture
def opened(tmp_path):
    """opened(state or model of transformers, ...) -> the model that `sq.load` makes of its file or folder."""

    def load(given, **how):
        if isinstance(given, transformers.PreTrainedModel):
            given.save_pretrained(tmp_path / "folder")
            return sq.load(tmp_path / "folder", **how)
        torch.save(given, tmp_path / "x.pth")
        return sq.load(tmp_path / "x.pth", **how)

    return load


def is_close(found, expected):
    return (found - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_microsoft_s_names_are_loaded_into_timm_s_model(opened):
    model = timm.create_model(NAME, num_classes=37).eval()
    loaded = opened({"model": microsoft(model.state_dict())}, config=f"timm:{NAME}")
    images = torch.randn(1, 3, 224, 224)
    assert is_close(loaded.module(images), model(images))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Swin", "Swinv2"])
def test_a_swin_of_masked_image_modelling_gives_its_embedding(opened, kind):
    sizes = {"image_size": 256, "window_size": 8} if kind == "Swinv2" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForMaskedImageModeling")(config).eval()
    images = torch.randn(1, 3, config.image_size, config.image_size)
    expected = getattr(model, kind.lower())(images).last_hidden_state.mean(1)
    assert is_close(opened(model, output_kind="embedding").module(images), expected)
    assert len(opened(model, output_kind="features").module(images)) == 4


@torch.no_grad()
def test_the_last_norm_of_a_backbone_is_that_of_its_embedding(opened):
    model = timm.create_model(NAME).eval()
    state = {key: value for key, value in microsoft(model.state_dict()).items() if not key.startswith("head.")}
    state = {f"backbone.{re.sub('^norm', 'norm3', key)}": value for key, value in state.items()}
    images = torch.randn(1, 3, 224, 224)
    expected = model.forward_head(model.forward_features(images), pre_logits=True)
    assert is_close(opened(state, output_kind="embedding").module(images), expected)


def swin(change):
    """timm's Swin-T after `change` of each linear layer: its state_dict."""
    model = timm.create_model(NAME)
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        change(layer)
    return model.state_dict()


def with_lora(state, whole=True):
    """The keys that PEFT writes: adapters, beside the weights of their layers if `whole`."""
    adapters = {f"base_model.model.{k[:-7]}.lora_A.default.weight": v for k, v in state.items() if "qkv.weight" in k}
    layers = {f"base_model.model.{k.replace('qkv.', 'qkv.base_layer.')}": v for k, v in state.items()}
    return adapters | (layers if whole else {})


def detr():
    backbone = transformers.SwinConfig(out_features=["stage4"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone
    )
    return transformers.DetrForObjectDetection(config)


def of_smp():
    """As `segmentation_models_pytorch` names the parts of a network with timm's backbone."""
    backbone = timm.create_model(NAME, features_only=True)
    return nn.ModuleDict({"encoder": nn.ModuleDict({"model": backbone}), "segmentation_head": nn.Conv2d(8, 2, 3)})


REFUSED = {
    "pruned": (lambda: swin(lambda one: prune.l1_unstructured(one, "weight", 0.3)), r"pruned .*prune\.remove\("),
    "weight norm": (lambda: swin(nn.utils.weight_norm), r"weight norm: .*remove_weight_norm\("),
    "spectral norm": (lambda: swin(nn.utils.spectral_norm), r"spectral norm: .*remove_spectral_norm\("),
    "parametrized": (lambda: swin(parametrizations.weight_norm), r"parametrized .*remove_parametrizations\("),
    "LoRA": (lambda: with_lora(swin(id)), r"LoRA adapters: .*merge_and_unload\("),
    "adapters": (lambda: with_lora(swin(id), whole=False), r"adapters without their model: .*merge_and_unload\("),
    "CLAP": (lambda: transformers.ClapModel(transformers.ClapConfig()).state_dict(), r"a CLAP: .*sq\.wrap"),
    "Swin2SR": (
        lambda: transformers.Swin2SRForImageSuperResolution(transformers.Swin2SRConfig()).state_dict(),
        r"Swin2SR .*sq\.wrap",
    ),
    "Donut": (
        lambda: transformers.DonutSwinForImageClassification(transformers.DonutSwinConfig()).state_dict(),
        r"no final norm, .*features.*sq\.wrap",
    ),
    "DETR": (lambda: detr().state_dict(), r"a detector whose backbone is a Swin V1 \(.*features"),
    "segmentation_models": (lambda: of_smp().state_dict(), r"a segmenter whose backbone is a Swin V1 \(.*features"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_kind_and_the_way(opened, name):
    make, says = REFUSED[name]
    with pytest.raises(sq.SwinQuantError, match=says) as refusal:
        opened(make())
    assert "damaged" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_folder_of_adapters_is_named_by_its_kind(tmp_path):
    save_file(with_lora(swin(id), whole=False), tmp_path / "adapter_model.safetensors")
    with pytest.raises(sq.SwinQuantError, match=r"adapters without their model: .*merge_and_unload\("):
        sq.load(tmp_path)


def test_arrays_in_the_place_of_tensors_are_not_called_damaged(tmp_path):
    torch.save({key: value.numpy() for key, value in swin(id).items()}, tmp_path / "swin.pth")
    with pytest.raises(sq.SwinQuantError, match="as NumPy arrays do: save tensors instead") as refusal:
        sq.load(tmp_path / "swin.pth")
    assert "damaged" not in str(refusal.value)


@pytest.mark.parametrize("make", [detr, of_smp])
def test_the_backbone_of_a_larger_model_opens_with_features(opened, make):
    model = opened(copy.deepcopy(make()).state_dict(), output_kind="features")
    assert model.name == NAME and len(model.module(torch.randn(1, 3, 224, 224))) >= 1


@pytest.mark.parametrize(("suffix", "says"), [(".pdparams", "PaddlePaddle"), (".npz", "NumPy")])
def test_files_of_other_frameworks_are_not_called_damaged(tmp_path, suffix, says):
    file = tmp_path / f"x{suffix}"
    if suffix == ".npz":
        np.savez(file, weight=np.zeros((2, 3), np.float32))
    else:  # `paddle.save` pickles a dict of arrays
        file.write_bytes(pickle.dumps({"weight": np.zeros((2, 3), np.float32)}, protocol=2))
    with pytest.raises(sq.SwinQuantError, match=says) as refusal:
        sq.load(file)
    assert "damaged" not in str(refusal.value)
