"""swin-quant train: the checkpoint of a float run; runs that are cut off, resumed, shared by ranks, or refused."""

import importlib
import itertools
import os
import signal
import time

import pytest
import torch
from nightly import share
from pass_contexts import same

from swin_quant.checkpoint import read_state_dict
from swin_quant.data.loader import LoaderKilled
from swin_quant.train import loop
from swin_quant.train.batches import TrainingBatches, ValidationBatches
from swin_quant.train.outdir import read_table

NAME = "swin_micro"


def weights(file):
    return read_state_dict(file)[0]


def test_float_training_leaves_a_checkpoint_that_can_be_calibrated(run, float_run, float_flags, tmp_path, card_of):
    run(*float_run, "--output", tmp_path / "out").ok()
    card = card_of(file := tmp_path / "out" / f"{NAME}.pth")
    assert card["source"] is None and card["policy"] is None and card["training"]["recipe"]["ema"] == 0.9
    run("calibrate", *float_flags, "--checkpoint", file, "--output", tmp_path / "calib").ok()


def wait_for_rows(file, count):
    end = time.monotonic() + 600  # later, it hangs
    while time.monotonic() < end:
        if file.exists() and len([*read_table(file)]) >= count:
            return
        time.sleep(0.005)
    pytest.fail(f"{file} never had {count} rows")


def slow_down():
    """A hook that makes each step from the eighth on take half a second, so that a kill hits the middle."""
    original, calls = loop._agree, []

    def agree(*arguments):
        calls.append(1)
        time.sleep(0.5 if len(calls) > 8 else 0)
        return original(*arguments)

    loop._agree = agree


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_killed_in_the_middle_and_resumed_it_ends_as_if_it_had_not_been(run, fork, float_run, tmp_path, how):
    slow = [*float_run, "--epochs", 3, "--set", "save_minutes=1e-9", "--device", "cpu"]
    assert run(*slow, "--output", tmp_path / "whole").code == 0
    child = fork([*slow, "--output", tmp_path / "killed"], before=slow_down)
    wait_for_rows(tmp_path / "killed" / "steps.csv", 8)
    os.kill(child.pid, how)
    done = child.wait()
    assert done.code == (-9 if how == signal.SIGKILL else 130)
    assert how == signal.SIGKILL or "interrupted; the run is saved: go on with" in done.err.splitlines()[-1]
    assert not (tmp_path / "killed" / f"{NAME}.pth").exists()
    assert run(*slow, "--output", tmp_path / "killed", "--continue").code == 0
    one, other = (tmp_path / name / f"{NAME}.pth" for name in ("whole", "killed"))
    assert same(weights(one), weights(other))
    assert len([*read_table(tmp_path / "killed" / "steps.csv")]) == 18


@pytest.mark.parametrize(
    ("batches", "place", "steps"), share([(TrainingBatches, "epoch", 4), (ValidationBatches, "__iter__", 6)], 2)
)
def test_the_loss_of_a_loader_and_an_interrupted_preparation_keep_what_was_trained(
    run, float_run, tmp_path, monkeypatch, batches, place, steps
):
    words, told = (
        [*float_run, "--output", tmp_path / "out"],
        "the run is saved: go on with the same command and --continue",
    )
    assert run(*float_run, "--output", tmp_path / "whole").code == 0
    load = getattr(batches, place)

    def lose(self, *arguments):
        yield from itertools.islice(load(self, *arguments), 4 if place == "epoch" else 1)
        raise LoaderKilled("a process is gone")

    with monkeypatch.context() as patch:
        patch.setattr(batches, place, lose)
        done = run(*words)
        assert (done.code, done.err.splitlines()[-1]) == (1, f"error: a process is gone; {told}")
    assert len([*read_table(tmp_path / "out" / "steps.csv")]) == steps

    def interrupted(*_, **how):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("swin_quant.train.run.open_labelled", interrupted)
        done = run(*words, "--continue")
        assert (done.code, done.err.splitlines()[-1]) == (130, f"error: interrupted; {told}")
    assert f"going on after step {steps} " in run(*words, "--continue").ok().err
    one, other = (tmp_path / name / f"{NAME}.pth" for name in ("whole", "out"))
    assert same(weights(one), weights(other))


TOLD = "precision: O0, because this CPU has no bfloat16 arithmetic; ‹amp_opt_level› O1 is slower here"


@pytest.mark.parametrize(
    ("verb", "words", "level"),
    [
        ("train", [], "O0"),
        ("finetune", ["--recipe", "micro_w4a4"], "O0"),
        ("train", ["--amp-opt-level", "O1"], "O1"),
        ("finetune", ["--recipe", "micro_w4a4", "--set", "precision=O1"], "O1"),
        ("train", ["--opts", "AMP_OPT_LEVEL", "O1"], "O1"),
        ("train", ["--recipe", "micro_float", "--set", "half=float16"], "O1"),
    ],
)
def test_a_cpu_without_bfloat16_computes_in_it_only_if_it_is_asked_to(
    run, scoring_flags, calibrated, heard, monkeypatch, tmp_path, verb, words, level
):
    calls = heard(importlib.import_module(f"swin_quant.verbs.{verb}"), "run_training", ends=True)
    start = ["--checkpoint", calibrated] if verb == "finetune" else []
    for able, expected in ((False, level), (True, "O1")):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda able=able: able)
        run(verb, *scoring_flags, *start, "--output", tmp_path, *words)
        assert calls[-1]["recipe"].precision == expected
        assert calls[-1]["request"].note == (TOLD if expected == "O0" else None)


def test_two_ranks_train_as_one_with_twice_the_accumulation(run, forked, float_run, tmp_path):
    assert run(*float_run, "--accumulation-steps", 2, "--output", tmp_path / "one").code == 0
    forked(2, *float_run, "--output", tmp_path / "two", code=0)
    tables = [[*read_table(tmp_path / name / "steps.csv")] for name in ("one", "two")]
    for one, two in zip(*tables, strict=True):
        assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=1e-5)
    one, two = (weights(tmp_path / name / f"{NAME}.pth") for name in ("one", "two"))
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-6) for key in one)


@pytest.mark.parametrize("stopped", share([False, True], 2))
def test_fsdp_trains_the_same_and_goes_on(run, forked, float_run, tmp_path, stopped):
    flags = [*float_run, "--set", "ema=0", "save_minutes=1e-9"]
    assert run(*flags, "--accumulation-steps", 2, "--output", tmp_path / "one").code == 0

    def stop(rank):
        agree, steps = loop._agree, itertools.count(1)
        loop._agree = lambda loss, asked, due, world: agree(loss, next(steps) == 4 or asked, due, world)

    if stopped:
        forked(2, *flags, "--fsdp", "--output", tmp_path / "two", before=stop, code=130)
    forked(2, *flags, "--fsdp", "--output", tmp_path / "two", *(["--continue"] if stopped else []), code=0)
    one, two = (weights(tmp_path / name / f"{NAME}.pth") for name in ("one", "two"))
    assert all(torch.allclose(one[key], two[key], rtol=1e-3, atol=1e-5) for key in one)


def test_a_folder_with_another_run_is_refused_and_left_alone(run, float_run, tmp_path, snapshot):
    words, file = [*float_run, "--output", tmp_path / "out"], tmp_path / "out" / f"{NAME}.pth"
    assert run(*words).code == 0
    before, trained = snapshot(tmp_path / "out"), weights(file)
    assert "holds the files of a training" in run(*words).error(2)
    line = run(*words, "--continue", "--lr", 0.5).error(2)
    assert "other settings: optimizer.lr 0.001 -> 0.5" in line
    assert snapshot(tmp_path / "out") == before
    assert "--overwrite replaces it: give one of them" in run(*words, "--continue", "--overwrite").error(2)
    assert run(*words, "--continue").code == 0  # a complete run stays as it is
    assert same(weights(file), trained)
    assert run(*words, "--overwrite", "--lr", 0.5).code == 0
    assert not same(weights(file), trained)


def test_results_without_a_snapshot_to_go_on_from_are_not_lost(run, float_run, tmp_path, snapshot):
    words = [*float_run, "--output", tmp_path / "out"]
    assert "out: holds no run to go on with: a new one begins" in run(*words, "--continue").ok().err
    for file in (tmp_path / "out" / "snapshots").glob("step_*.pt"):
        file.unlink()
    before = snapshot(tmp_path / "out")
    assert "no snapshot to go on from: --overwrite starts anew" in run(*words, "--continue").error(2)
    for name in ("epochs.csv", "steps.csv"):
        (tmp_path / "out" / name).unlink()
    assert "holds the files of a training" in run(*words).error(2)  # the folder's best weights are another run's
    kept = {name: data for name, data in before.items() if not str(name).endswith(".csv")}
    assert kept == snapshot(tmp_path / "out")
