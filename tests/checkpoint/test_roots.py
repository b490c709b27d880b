"""A model is found under any prefix, in any order of wrappers, with its head and other parts beside it."""

import pytest
import torch

from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.models import build_model

SHAPE = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2]}
TRAINING = {"criterion.weight": torch.ones(3), "n_averaged": torch.tensor(3), "train_acc.total": torch.ones(1)}


def under(prefix, state):
    return {prefix + key: value for key, value in state.items()}


def parts(state, head, prefix):
    """The backbone under a prefix, and its head under another name."""
    return {
        key.replace("head.", head) if key.startswith("head.") else prefix + key: value for key, value in state.items()
    }


@pytest.mark.parametrize(
    "kept",
    [
        lambda state: under("model.", state) | TRAINING,
        lambda state: state | TRAINING | {"mask_token": torch.zeros(1, 1, 96)},
        *(lambda state, head=head: parts(state, head, "backbone.") for head in ("head.", "classifier.", "fc.")),
        lambda state: under("model.", parts(state, "head.", "encoder.")),
        lambda state: state | under("ema.", {key: value + 1 for key, value in state.items()}),
    ],
)
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_the_model_is_found(kind, kept, tiny_model, tmp_path):
    source = tiny_model(kind, seed=3, **SHAPE, **({"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}))
    state = {key: value for key, value in source.state_dict().items() if not key.endswith("_amax")}
    torch.save({"state_dict": kept(state)}, tmp_path / "x.pth")
    made = build_model(config_for(tmp_path / "x.pth"))
    load_float(made, tmp_path / "x.pth")
    assert all(torch.equal(made.state_dict()[key], value) for key, value in state.items())
