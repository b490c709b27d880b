"""swin-quant cuda plan: its table, its files, and the input that it refuses."""

import json

import pytest

import swin_quant as sq

PLAN = ("cuda", "plan")
SWIN_T = ("--cfg", "swin_tiny_patch4_window7_224")


def test_without_a_model_it_is_that_of_swin_t(run):
    bare, named = run(*PLAN, "--gpu", "l4"), run(*PLAN, *SWIN_T, "--gpu", "l4")
    assert bare.code == 0 and bare.out == named.out and "planned, not measured: swin_tiny" in bare.out


def test_the_table_says_that_it_was_planned_and_adds_up(run, micro, tmp_path):
    done = run(*PLAN, *SWIN_T, "--gpu", "a100", "--batch", "8", "--output", tmp_path).ok()
    assert done.out.startswith("planned, not measured: swin_tiny_patch4_window7_224, batch 8") and "fp8" not in done.out
    assert "layers.2.blocks.*.mlp.fc1" in done.out and "norm1 into qkv" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    found = json.loads((tmp_path / "plan.json").read_text())
    for precision in ("int8", "fp16"):
        parts = sum(one["floors"][precision]["us"] for one in found["launches"])
        assert found["us"][precision] == pytest.approx(parts) and parts > 0
    assert found["status"] == "planned, not measured"
    assert "| all |" in (tmp_path / "plan.md").read_text() and (tmp_path / "plan.csv").read_text().count("\n") > 20


def test_by_compiled_kernels_each_launch_has_an_estimate_and_a_range(run, tmp_path):
    done = run(*PLAN, "--static", "--gpu", "h100", "--output", tmp_path).ok()
    head = " ".join(done.out.split())
    assert head.startswith("estimated from compiled kernels, not measured: swin_tiny_patch4_window7_224, batch 32")
    assert max(map(len, done.out.splitlines())) <= 100
    found = json.loads((tmp_path / "static.json").read_text())
    for precision, launches in found["launches"].items():
        estimates = [one["estimate"] for one in launches]
        assert found["us"][precision]["us"] == pytest.approx(sum(one["us"] for one in estimates))
        for one, launch in zip(estimates, launches, strict=True):
            assert launch["floor"]["us"] < one["us"] and one["low"] < one["us"] < one["high"]
            assert one["bounds"][one["bound"]] > 0 and one["waves"] >= 1
    assert "int8" in found["launches"] and "| all |" in (tmp_path / "static.md").read_text()
    assert (tmp_path / "static.csv").read_text().count("\n") > 20


def test_a_model_whose_kernels_were_not_counted_is_refused(run, micro):
    done = run(*PLAN, micro / "swin.pth", "--cfg", micro / "swin.yaml", "--static")
    assert "batch 32: its kernels were not counted: take a Swin" in done.error(2)


def test_of_a_gpu_whose_int8_has_no_peak_to_reach_it_says_so(run, micro):
    done = run(*PLAN, micro / "swin.pth", "--cfg", micro / "swin.yaml", "--gpu", "b200", "--batch", "1")
    assert done.code == 0 and "float8 is the format of this GPU" in " ".join(done.out.split())


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_checkpoint_as_json(run, micro, kind):
    done = run(*PLAN, micro / f"{kind}.pth", "--cfg", micro / f"{kind}.yaml", "--batch", "1", "--json")
    found = json.loads(done.out)
    assert found["batch"] == 1 and found["int8 at most"] >= 1 and found["machine"]["gpu"]["capability"] == 90


def test_from_python(micro):
    found = sq.plan(sq.load(micro / "swin.pth", micro / "swin.yaml"), gpu="l4", batch=4)
    assert "planned, not measured" in str(found) and "<table" in found._repr_html_()
    assert found.to_dict()["us"]["fp8"] > 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["--gpu", "h300"], "no machine 'h300'; did you mean h200?"),
        (["--gpu", "x"], "no machine 'x': give a10"),
        (["--gpu", "t4"], "is no GPU that the CUDA engine runs on"),
        (["--batch", "0"], "--batch 0: must be from 1 to 4096"),
    ],
)
def test_bad_input_is_one_line(run, words, said):
    assert said in run(*PLAN, *SWIN_T, *words).error(2)
