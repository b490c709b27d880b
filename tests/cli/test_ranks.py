"""Several processes: the same ranges and figures as one, every picture once, and all end when one fails."""

import itertools
import os
import signal
import socket
import time

import numpy as np
import pytest
from commands import after_one_batch
from nightly import share
from PIL import Image

from swin_quant.base import distributed
from swin_quant.base.errors import SwinQuantError


@pytest.fixture
def both(run, forked, scoring_flags, card_of, tmp_path):
    """both(flags ..., scored=flags) -> the ends of an evaluation on two ranks, and the run cards of a calibration and
    an evaluation on one rank and on two, which write the same bytes and figures."""

    def go(*flags, scored=()):
        files = [tmp_path / folder / "swin_micro_calib.pth" for folder in ("one", "two")]
        run("calibrate", *flags, "--output", files[0].parent).ok()
        forked(2, "calibrate", *flags, "--output", files[1].parent, code=0)
        run("evaluate", files[0], *scoring_flags, *scored).ok()
        ends = forked(2, "evaluate", files[1], *scoring_flags, *scored, code=0)
        assert files[0].read_bytes() == files[1].read_bytes()
        one, two = map(card_of, files)
        assert one["calibration"] == two["calibration"] and one["checkpoint"] == two["checkpoint"]
        for a, b in zip(one["results"], two["results"], strict=True):
            for key in "pictures acc1 acc5 agreement delta_acc1 delta_acc1_se unreadable dataset".split():
                assert a[key] == b[key], (key, a, b)
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        return ends, one, two

    return go


@pytest.mark.parametrize("how", share([["--calibrator", "percentile", "--exact"], ["--calibrator", "max"]], 2))
def test_two_ranks_give_the_ranges_and_figures_of_one(both, float_flags, how):
    """3 batches and 7 pictures of val: the ranks' shares are unequal in both passes."""
    ends, _, two = both(*float_flags, "--pictures", 9, "--batch", 3, "--policy", "ft-mode2", *how)
    assert two["results"][0]["pictures"] == 7
    assert "ft-mode2" in ends[0].out or "int8" in ends[0].out
    assert ends[1].out == "" and ends[1].err == ""  # only rank 0 prints


@pytest.mark.nightly
def test_unreadable_pictures_are_replaced_by_the_same_ones_on_any_number_of_ranks(both, float_flags, own_pictures):
    for broken in ("train/cat/00.png", "train/fox/05.png", "val/dog/01.png"):
        (own_pictures / broken).write_bytes(b"")
    flags = ("--data-path", own_pictures, "--max-unreadable", 0.5)
    _, one, two = both(*float_flags, *flags, scored=flags)
    assert one["calibration"]["pictures"] == 8 == len(set(one["calibration"]["files"]))
    assert two["results"][0]["pictures"] == 6 and two["results"][0]["unreadable"] == 1


@pytest.mark.nightly
def test_a_rank_without_any_picture(both, float_flags, own_pictures):
    for file in sorted((own_pictures / "val").rglob("*.png"))[1:]:
        file.unlink()
    there = ("--data-path", own_pictures)
    _, _, two = both(*float_flags, *there, "--pictures", 4, scored=there)
    assert two["results"][0]["pictures"] == 1 and two["calibration"]["pictures"] == 4


@pytest.mark.nightly
@pytest.mark.parametrize("passes", [["--passes", "fast"], []])
def test_a_rank_whose_kernels_measure_otherwise_does_as_rank_0_does(passes, forked, float_flags, card_of, tmp_path):
    """Otherwise it would undo alone a change that the other keeps, or skip passes in which the other waits for it."""

    def before(rank):
        from swin_quant.quant.passes import run as running
        from swin_quant.verbs import calibration as passes

        passes.outliers = lambda piece: {} if rank else {"layers.0.blocks.0.norm1": 6.0}
        if rank:
            worse = itertools.count()
            running.compare = lambda *given: (100.0, -float(next(worse)))

    flags = [*float_flags, "--policy", "qdq", *passes]
    for world in (1, 2):
        ends = forked(world, "calibrate", *flags, "--output", tmp_path / str(world), before=before)
        assert [done.code for done in ends] == [0] * world, ends
    one, two = (card_of(tmp_path / world / "swin_micro_calib.pth") for world in ("1", "2"))
    assert one["checkpoint"] == two["checkpoint"]
    one, two = (card["calibration"] for card in (one, two))
    assert one["check"] == two["check"] and one["passes"][0]["name"] == "equalize"
    assert [each["kept"] for each in one["passes"]] == [each["kept"] for each in two["passes"]]


@pytest.fixture
def wide(tmp_path):
    """make((width, height), ...): a folder of pictures of these sizes, and an unreadable one for None."""

    def make(*sizes):
        for number, size in enumerate(sizes):
            file = tmp_path / "wide" / "train" / "x" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            if size:
                values = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3))
                Image.fromarray(values.astype(np.uint8)).save(file)
            else:
                file.write_bytes(b"")
        return tmp_path / "wide"

    return make


@pytest.mark.nightly
def test_ranks_agree_on_whether_pictures_are_of_several_sizes(forked, float_flags, wide, tmp_path):
    """Each rank sees a single size: neither may wait alone for the other, or concatenate maps of different sizes."""
    flags = [*float_flags, "--data-path", wide((40, 24), (32, 48)), "--output-kind", "features", "--pictures", 2,
             "--policy", "qdq", "--opts", "TEST.SHAPE", "whole"]  # fmt: skip
    ends = forked(2, "calibrate", *flags, "--output", tmp_path / "two", code=0)
    assert "calibrated checkpoint" in ends[0].err
    refused = forked(2, "calibrate", *flags[:-3], "--passes", "fast", *flags[-3:], "--output", tmp_path / "three")
    assert [done.code for done in refused] == [2, 2] and "needs pictures of one size" in refused[0].err


def test_a_picture_that_cannot_be_read_is_of_no_size(run, float_flags, wide, card_of, tmp_path):
    flags = [*float_flags, "--data-path", wide((48, 32), (48, 32), None, (48, 32)), "--output-kind", "features",
             "--policy", "qdq", "--opts", "TEST.SHAPE", "whole"]  # fmt: skip
    flags += ["--max-unreadable", 0.5, "--pictures", 3, "--passes", "fast", "--output", tmp_path]
    run("calibrate", *flags).ok()
    found = card_of(tmp_path / "swin_micro_calib.pth")["calibration"]
    assert found["passes"] and found["pictures"] == 3 and len(found["unreadable"]) == 1


def dies(victim, how):
    """A hook that makes rank `victim` end in the middle of calibration."""

    def before(rank):
        if rank == victim:
            after_one_batch(how)

    return before


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise SwinQuantError("the moon is full")


@pytest.mark.nightly
def test_the_reason_of_one_rank_ends_all(forked, float_flags, snapshot, tmp_path):
    flags = [*float_flags, "--output", tmp_path / "out", "--quiet"]
    other, failed = forked(2, "calibrate", *flags, before=dies(1, refuse))
    assert "the moon is full" in failed.error(1) and "rank 1" in failed.err
    assert "the moon is full" in other.error(1) and "rank 1 failed" in other.err
    assert snapshot(tmp_path / "out") == {}


def test_a_rank_that_is_killed_ends_the_other(forked, float_flags, snapshot, tmp_path):
    """The other waits in a collective, where the broken connection shows at once."""
    flags = [*float_flags, "--output", tmp_path / "out", "--quiet"]
    other, killed = forked(2, "calibrate", *flags, before=dies(1, kill))
    assert killed.code == -signal.SIGKILL and "another rank is gone" in other.error(1)
    assert snapshot(tmp_path / "out") == {}


@pytest.mark.nightly
def test_a_rank_that_never_starts_is_not_waited_for(forked, float_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "_JOIN_TICKS", 4)
    flags = [*float_flags, "--output", tmp_path / "out"]
    alone, gone = forked(2, "calibrate", *flags, before=lambda rank: rank and os._exit(7))
    assert gone.code == 7 and "within 4 s: rank 1 never came" in alone.error(1)


@pytest.mark.nightly
def test_a_rank_that_falls_silent_ends_the_other_while_it_computes(forked, float_flags, tmp_path, monkeypatch):
    """Neither waits in a collective, so only the heartbeat shows it. Its timeout is shortened here."""
    monkeypatch.setattr(distributed, "_SILENCE_TICKS", 6)

    def before(rank):
        dies(1, kill)(rank)
        dies(0, lambda: time.sleep(600))(rank)

    flags = [*float_flags, "--output", tmp_path / "out", "--quiet"]
    computing, killed = forked(2, "calibrate", *flags, before=before)
    assert killed.code == -signal.SIGKILL and "rank 1 stopped answering" in computing.error(1)


def test_an_environment_that_no_launcher_makes(run, float_flags, monkeypatch):
    for environment, says in (
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "127.0.0.1:0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65536"}, "127.0.0.1:65536"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a..b", "MASTER_PORT": "1"}, "a..b:1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK is 2 of WORLD_SIZE 2"),
    ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert says in run("calibrate", *float_flags).error(2)


def test_a_port_that_is_taken(run, float_flags, monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | place).items():
            monkeypatch.setenv(name, value)
        line = run("calibrate", *float_flags).error(1)
    assert f"cannot meet the other ranks at 127.0.0.1:{place['MASTER_PORT']}" in line and "in use" in line


def test_what_runs_in_one_process_says_so(forked, tmp_path):
    ends = forked(2, "demo", "--output", tmp_path / "out")
    assert all("without torchrun" in done.error(2) or "without torchrun" in done.error(1) for done in ends)
    assert not (tmp_path / "out").exists()
