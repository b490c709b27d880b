"""Swin V2 whose last stage was evened out, with factors behind it: kept, loaded, exported, or refused by name."""

import pytest
import torch

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.config import load_config
from swin_quant.models import build_model
from swin_quant.quant.factors import made_factors
from swin_quant.quant.policy import dequantize

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, write_config, randomise):
    """The file of a V2 that every engine runs, with a channel of the last stream that stands out."""
    folder = tmp_path_factory.mktemp("uneven")
    config = write_config(folder, "swinv2", EMBED_DIM=32, NUM_HEADS=[1, 2])
    module = randomise(build_model(load_config(config)))
    with torch.no_grad():
        module.layers[-1].blocks[0].norm1.weight[3] *= 30
        module.head.weight[:, 3] = 0
    torch.save({"model": {k: v for k, v in module.state_dict().items() if not k.endswith("_amax")}}, folder / "v2.pth")
    return folder / "v2.pth", config


@pytest.fixture
def evened(uneven):
    def make(policy):
        return sq.calibrate(sq.load(*uneven), [IMAGES], policy, passes=["equalize"])

    return make


def test_the_file_brings_the_factors(evened, tmp_path):
    model = evened("qdq")
    again = sq.load(model.save(tmp_path / "evened.pth"))
    assert made_factors(again.module) == ["norm.factors"]
    assert torch.equal(again(IMAGES), model(IMAGES))


def test_factors_of_another_width_are_refused_and_nothing_is_loaded(evened, uneven, tmp_path):
    file = evened("qdq").save(tmp_path / "evened.pth")
    state = torch.load(file, weights_only=True)
    state["norm.factors.weight"] = state["norm.factors.weight"][:-1]
    torch.save(state, file := tmp_path / "other.pth")
    with pytest.raises(SwinQuantError, match=r"norm.factors.weight \(is \[\d+\], must be \[\d+\]\)"):
        sq.load(file, config=uneven[1])


@pytest.mark.parametrize("policy, engine", [("qdq", "onnxruntime"), ("cpu", "openvino"), ("cuda", "cuda")])
def test_engines_compute_with_them(policy, engine, evened, tmp_path):
    model = evened(policy)
    with torch.inference_mode():
        expected = model(IMAGES)
    found = torch.as_tensor(sq.export(model, engine, tmp_path).load()(IMAGES))
    noise = (expected - model.module(IMAGES)).abs().mean()
    assert (found - expected).abs().mean() < max(0.02, noise)


def test_fastertransformer_has_no_such_multiplication(evened, uneven, tmp_path):
    with pytest.raises(UsageError, match=r"`equalize` put factors at norm.factors.*under ft-mode1"):
        again = sq.load(evened("qdq").save(tmp_path / "evened.pth"))
        sq.export(sq.calibrate(again, [IMAGES], "ft-mode1", passes=[]), "fastertransformer", tmp_path / "ft")
    model = sq.calibrate(sq.load(*uneven), [IMAGES], "ft-mode1", passes=["equalize"])
    assert not made_factors(model.module)
    assert sq.export(model, "fastertransformer", tmp_path / "ft").file.is_file()


def test_convert_gives_others_the_names_that_they_know(evened, tmp_path, run):
    model = evened("qdq")
    model.save(tmp_path / "evened.pth")
    assert run("convert", "--checkpoint", tmp_path / "evened.pth", "--to", tmp_path / "plain.safetensors").code == 0
    plain = sq.load(tmp_path / "plain.safetensors")
    assert not made_factors(plain.module)
    with torch.inference_mode():
        dequantize(model.module)
        assert torch.allclose(plain.module(IMAGES), model.module(IMAGES), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, more", [(1, []), (2, []), (2, ["--set", "memory.fsdp=true"])])
def test_training_goes_on_with_them(ranks, more, evened, uneven, tmp_path, pictures, run, forked):
    file = evened("qdq").save(tmp_path / "evened.pth")
    (tmp_path / "recipe.yaml").write_text("epochs: 1\naugment: {crop: padded}\noptimizer: {lr: 1.0e-3}\n")
    words = ["finetune", "--cfg", uneven[1], "--checkpoint", file, "--data-path", pictures, "--distill", "--batch", 2]
    words += ["--device", "cpu", "--half", "none", "--recipe", tmp_path / "recipe.yaml", "--output", tmp_path / "out"]
    if ranks == 1:
        assert run(*words, *more).code == 0
    else:
        assert all(one.code == 0 for one in forked(ranks, *words, *more))
    trained = sq.load(next((tmp_path / "out").glob("*.pth")))
    assert made_factors(trained.module) == ["norm.factors"]
    assert not torch.equal(trained.module.norm.factors.weight, sq.load(file).module.norm.factors.weight)
