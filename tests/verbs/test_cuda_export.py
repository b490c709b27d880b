"""The CUDA engine from the command line without a GPU: emulated, or refused in one line that names what is missing."""

from dataclasses import replace

import pytest
import torch
from commands import command
from nightly import share

from swin_quant.backends.cuda import engine
from swin_quant.backends.cuda.sessions import HostSession, sizes
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.serving.app import ServiceLimits
from swin_quant.verbs.serve import load_service

FORMS = [
    "--policy cuda",
    "--policy cuda --off *.mlp.fc1.* *.attn.qkv.*",  # float products whose results become levels
    "--policy cuda-fp8",
    "--precision float",
    "--policy cuda --uint8-input",
]


@pytest.fixture(scope="session")
def files(calibrated_32, tmp_path_factory):
    """The files that `export --for cuda` writes for the calibrated micro model, by its flags."""
    made, folder = {}, tmp_path_factory.mktemp("cuda")

    def make(*flags):
        if flags not in made:
            out = folder / str(len(made))
            command("export", calibrated_32, "--for", "cuda", *flags, "--output", out, "--quiet")
            (made[flags],) = out.glob("*.safetensors")
        return made[flags]

    return make


@pytest.fixture
def file(files):
    return files("--policy", "cuda")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_card_says_the_form_of_gelu(files):
    """Its errors are those that tests/backends/cuda/kernels/test_rounding.py measures."""
    int8, fp8 = (open_artifact(files("--policy", name)).record["options"]["gelu"] for name in ("cuda", "cuda-fp8"))
    assert int8.keys() == {"int8"} and "degree 3 in the exponent, within 5.5e-5" in int8["int8"]
    assert "degree 5 in the exponent, within 2.8e-7" in fp8["fp8"]


@pytest.mark.parametrize("flags", share(FORMS, 2))
def test_verify_finds_every_form_to_be_the_model(run, files, calibrated_32, pictures, flags):
    words = ("--checkpoint", calibrated_32, "--data-path", pictures, "--pictures", 4, "--device", "cpu")
    done = run("verify", files(*flags.split()), *words).ok()
    assert "cuda (emulated)" in done.out + done.err


def test_predict_and_evaluate(run, file, pictures):
    picture = sorted((pictures / "val").rglob("*.png"))[0]
    assert run("predict", file, picture, "--device", "cpu").code == 0
    scored = run("evaluate", file, "--data-path", pictures, "--engine", "cuda", "--device", "cpu")
    assert scored.code == 0 and "cuda (emulated)" in scored.out, scored.err
    timed = run("evaluate", file, "--no-accuracy", "--batch", 1, "--device", "cpu").ok()
    assert " on cuda: " in timed.out and "images/s" in timed.out


def test_without_a_gpu_that_is_asked_for(run, file, no_gpu, calibrated_32, pictures, tmp_path):
    for verb, *words in (
        ("evaluate", "--data-path", pictures),
        ("predict", pictures / "val", "--json", tmp_path / "answers.json"),
        ("verify", "--checkpoint", calibrated_32, "--data-path", pictures),
    ):
        assert "no GPU" in run(verb, file, *words, "--device", "cuda").error(2)
    assert not list(tmp_path.iterdir())


def test_policies_and_flags_that_it_does_not_run(run, calibrated_32, tmp_path):
    def refused(*flags):
        message = run("export", calibrated_32, "--for", "cuda", *flags, "--output", tmp_path / "x").error(2)
        assert not list(tmp_path.rglob("*.safetensors"))
        return message

    assert "has no zero points" in refused("--policy", "cpu")
    assert "--float-type bfloat16: ft-mode2 is" in refused("--policy", "ft-mode2", "--float-type", "bfloat16")
    assert "--float-type float32: the CUDA engine has float16 and bfloat16" in refused("--float-type", "float32")
    assert "--batch 5000: must be at least 1, at most 4096" in refused("--batch", 5000)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Load every engine as if on a GPU but run it on the CPU."""
    monkeypatch.setattr(engine, "GraphSession", lambda network, device, largest, machine: HostSession(network))
    monkeypatch.setattr(engine, "check_gpu", lambda format="int8": None)
    monkeypatch.setattr(engine, "check_launcher", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    load = engine.load
    monkeypatch.setattr(engine, "load", lambda artifact, options: load(artifact, replace(options, device="cuda")))


@pytest.mark.parametrize("largest", [1, 7])
def test_serve_captures_what_any_batch_needs_before_the_first_client(file, fake_gpu, monkeypatch, largest):
    ran = counted_batches(monkeypatch)
    service = load_service(open_artifact(file), limits=ServiceLimits(max_batch=largest))
    captured = {filled_up(batch) for batch in ran}
    assert captured == {filled_up(batch) for batch in range(1, largest + 1)} and len(captured) == len(ran)
    assert service.limits.max_batch == largest


def counted_batches(monkeypatch):
    """The number of pictures in each call of a session."""
    ran, call = [], HostSession.__call__
    monkeypatch.setattr(HostSession, "__call__", lambda self, images: ran.append(len(images)) or call(self, images))
    return ran


def filled_up(batch):
    """The size to which a batch is padded if the file takes up to 256 pictures."""
    return next(size for size in sizes(256) if size >= batch)
