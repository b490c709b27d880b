"""Two writers of a folder: the second is refused. The tables of a run, damaged ones too, and its plot, by its texts."""

import errno
import fcntl
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import time
from contextlib import nullcontext

import pytest

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.train.outdir import EPOCHS, NAME, STEPS, Record, draw, only_writer, read_table

FORK = multiprocessing.get_context("fork")


def take(folder, answers, seconds=0.0):
    try:
        with only_writer(folder, World()):
            answers.put("mine")
            time.sleep(seconds)
    except SwinQuantError as error:
        answers.put(str(error))


@pytest.fixture
def other(tmp_path):
    """other(seconds) -> the result of another process that wants the folder for `seconds`, and the process."""
    processes = []

    def start(seconds=0.0):
        answers = FORK.Queue()
        processes.append(FORK.Process(target=take, args=(tmp_path / "out", answers, seconds)))
        processes[-1].start()
        return answers.get(timeout=600), processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_a_second_writer_is_refused_with_the_owner_s_name(tmp_path, other):
    with only_writer(tmp_path / "out", World()):
        line, _ = other()
        assert f"another training (process {os.getpid()} on " in line and "another output" in line
        with only_writer(tmp_path / "out", World()):
            pass
        assert other()[0] == line  # a folder locked twice stays locked in between
    answer, process = other()
    process.join()
    assert answer == "mine" and list((tmp_path / "out").iterdir()) == []


def test_the_lock_of_a_dead_owner_counts_for_nothing(tmp_path, other):
    answer, owner = other(seconds=600)
    assert answer == "mine"
    with pytest.raises(SwinQuantError, match=f"process {owner.pid} on"), only_writer(tmp_path / "out", World()):
        pass
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert (tmp_path / "out" / NAME).exists()
    with only_writer(tmp_path / "out", World()):
        assert json.loads((tmp_path / "out" / NAME).read_text())["pid"] == os.getpid()


def test_where_there_are_no_locks_the_pid_decides(tmp_path, monkeypatch):
    def lockf(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    out = tmp_path / "out"
    out.mkdir()
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    for owner, free in (({"pid": dead.pid}, True), ({"pid": os.getppid()}, False), ({"host": "other"}, False)):
        (out / NAME).write_text(json.dumps({"pid": 1, "host": os.uname().nodename} | owner))
        refused = nullcontext() if free else pytest.raises(SwinQuantError, match="if it is no more, remove")
        with refused, only_writer(out, World()):
            pass


def test_a_lock_file_of_other_content_is_no_obstacle(tmp_path):
    for content in ("", "{", "[]", '{"pid": "x", "host": 1}', "\0" * 2000):
        (tmp_path / NAME).write_text(content)
        with only_writer(tmp_path, World()):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def filled(folder, epochs=3, total=0, epoch=0):
    """The record of a run of two steps an epoch."""
    record = Record(folder, total, epoch)
    for number in range(epoch + 1, epochs + 1):
        for step in (1, 2):
            place = {"total": 2 * (number - 1) + step, "epoch": number, "step": step}
            record.step(place | {"loss": 1 / number, "lr": 1e-3, "grad_norm": 1.0, "images_per_second": 100.0})
        row = {"epoch": number, "total": 2 * number, "train_loss": 0.5, "val_loss": 0.6, "acc1": 70.0 + number}
        record.epoch(row | {"acc5": 99.0, "amax_drift": 0.01, "clipped_share": 1e-4, "seconds": 3.0}, {})
    record.close()


def test_rows_are_written_as_they_come_and_going_on_drops_what_is_done_again_and_a_row_that_was_cut(tmp_path):
    filled(tmp_path)
    steps = read_table(tmp_path / "steps.csv")
    assert [row["total"] for row in steps] == ["1", "2", "3", "4", "5", "6"]
    assert steps[2]["loss"] == "0.5" and steps[2]["lr_amax"] == ""
    assert [row["acc1"] for row in read_table(tmp_path / "epochs.csv")] == ["71", "72", "73"]
    with open(tmp_path / "steps.csv", "a") as file:
        file.write("7,4,1,0.2")
    filled(tmp_path, epochs=2, total=2, epoch=1)
    assert [row["total"] for row in read_table(tmp_path / "steps.csv")] == ["1", "2", "3", "4"]
    assert [row["epoch"] for row in read_table(tmp_path / "epochs.csv")] == ["1", "2"]
    filled(tmp_path, epochs=1)
    assert len(read_table(tmp_path / "steps.csv")) == 2


DAMAGED = {
    "other bytes": bytes(range(128, 256)) * 20,
    "nothing": b"",
    "NUL": b"\0" * 4000,
    "another table": b"a,b\n1,2\n",
    "no numbers": b"total,epoch,step,loss,lr,lr_amax,grad_norm,images_per_second\nx,1,1,1,1,1,1,1\n",
    "a line without end": b"total," + b"1" * 300_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_is_passed_over(tmp_path, caplog, name):
    filled(tmp_path)
    (tmp_path / "steps.csv").write_bytes(DAMAGED[name])
    (tmp_path / "epochs.csv").write_bytes(DAMAGED[name])
    filled(tmp_path, epochs=2, total=2, epoch=1)
    assert [row["total"] for row in read_table(tmp_path / "steps.csv")] == ["3", "4"]
    assert [row["epoch"] for row in read_table(tmp_path / "epochs.csv")] == ["2"]
    assert "steps.csv is damaged: it is begun anew" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_has_scalars_and_histograms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = Record(tmp_path, 0, 0, tensorboard=True)
    record.step({"total": 1, "epoch": 1, "step": 1, "loss": 0.5, "lr": 1e-3})
    record.epoch({"epoch": 1, "total": 1, "train_loss": 0.5, "acc1": 70.0}, {"amax/weights": [0.1, 0.2, 0.4]})
    record.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"step/loss", "step/lr", "epoch/train_loss", "epoch/acc1"} <= set(events.Tags()["scalars"])
    assert events.Tags()["histograms"] == ["amax/weights"]


def test_a_plot_is_an_svg_or_a_png_and_one_of_tables_that_are_gone_an_error_in_one_line(tmp_path, monkeypatch):
    """Of four epochs that differ by a tenth of a point, beside two models; the axis of top-1 spans two points."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    (tmp_path / STEPS).write_text("total,loss\n1,0.9\n2,0.8\n")
    rows = "".join(f"{epoch},{epoch},0.8,0.7,{80 + epoch / 40},0.01\n" for epoch in range(1, 5))
    (tmp_path / EPOCHS).write_text(f"epoch,total,train_loss,val_loss,acc1,amax_drift\n{rows}")
    assert draw(tmp_path).read_bytes().startswith(b"\x89PNG")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", draw(tmp_path, "svg", levels={"float": 80.5}).read_text())
    assert {"validation top-1 (%)", "mean |change| of amax", "float 80.50"} <= {*texts}
    ticks = [float(text) for text in texts if re.fullmatch(r"(79|80|81)\.\d+", text)]
    assert min(ticks) < 79.6 and max(ticks) > 80.9
    with pytest.raises(SwinQuantError, match="steps.csv: the table cannot be read: No such file"):
        draw(tmp_path / "away")
