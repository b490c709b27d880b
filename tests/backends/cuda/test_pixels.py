"""Pictures as bytes: the patch embedding's weights normalise them, and logits equal those of normalised pictures."""

import pytest
import torch

from swin_quant.backends.cuda.engine import load
from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.backends.cuda.sessions import as_input
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.policy import load_policy

PREPROCESS = Preprocess(size=8, crop=False, interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.2, 0.3))


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


@pytest.fixture
def made(calibrated, tmp_path):
    """made(uint8_input=True, policy="cuda", ...) -> the artifact."""

    def make(policy="cuda", **options):
        card = RunCard("micro", {}, PREPROCESS.to_dict(), policy=load_policy(policy).to_dict())
        return export(calibrated("swin", policy), card, tmp_path, CudaOptions(**options))

    return make


@pytest.mark.parametrize("float_type", ["float16", "bfloat16"])
def test_pixels_give_the_logits_of_normalised_pictures(made, pixels, float_type):
    """In half precision: rounding activations to int8 would hide rounding errors of the folding."""
    whole, folded = (load(made(uint8_input=uint8, precision="float", float_type=float_type)) for uint8 in (False, True))
    images = PREPROCESS.normalised(pixels)
    expected, got = whole(images), folded(images)
    assert (got - expected).abs().mean() < {"float16": 0.002, "bfloat16": 0.02}[float_type] * expected.std()
    assert torch.equal(folded(pixels), got)  # decoded pixels


def test_pictures_become_pixels_where_they_are(made):
    """Pictures on a GPU stay there; from the meta device no value could come to the CPU."""
    network = load(made(uint8_input=True)).run.network
    given = as_input(network, torch.empty(2, 3, 8, 8, device="meta"))
    assert given.is_meta and given.dtype == torch.uint8 and given.shape == (2, 8, 8, 3)


def test_the_file_says_that_it_takes_pixels(made, pixels):
    artifact = made(uint8_input=True)
    assert artifact.file.name == "micro_int8_uint8_cuda.safetensors" and artifact.record["options"]["uint8_input"]
    opened = open_artifact(artifact.file)
    assert load(opened).run.network.preprocess == PREPROCESS
    opened.card.preprocess["mean"] = [0.5, 0.5, 0.5]
    with pytest.raises(SwinQuantError, match="prepares pictures differently from its run card"):
        load(opened)


def test_pixels_where_they_are_not_taken(made, pixels):
    engine = load(made())
    with pytest.raises(UsageError, match="takes normalised pictures, not pixels: export with uint8_input"):
        engine(pixels)
    with pytest.raises(UsageError, match="takes pictures of 8 x 8 x 3, not 3 x 8 x 8"):
        engine(pixels.permute(0, 3, 1, 2))
    with pytest.raises(UsageError, match="uint8_input: ft-mode1 rounds normalised pictures"):
        made("ft-mode1", uint8_input=True)
