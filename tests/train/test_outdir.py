"""Two writers of a folder: the second is refused. The tables of a run, damaged ones too."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import time

import pytest

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.train.outdir import Record, only_writer, read_table

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


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    folder = tmp_path / "out"
    for is_there in (False, True):
        with contextlib.suppress(SwinQuantError), only_writer(folder, World()):
            raise SwinQuantError("refused")
        assert folder.exists() == is_there
        folder.mkdir(exist_ok=True)  # the user's own stays
    with only_writer(tmp_path / "new", World()):
        (tmp_path / "new" / "result").touch()
    assert {one.name for one in (tmp_path / "new").iterdir()} == {".lock", "result"}


def test_a_second_writer_is_refused(tmp_path, other):
    with only_writer(tmp_path / "out", World()):
        line, _ = other()
        assert "out: another training is writing there" in line and "another output" in line
    assert other()[0] == "mine"


def test_the_lock_of_a_dead_owner_counts_for_nothing(tmp_path, other):
    answer, owner = other(seconds=600)
    assert answer == "mine"
    with pytest.raises(SwinQuantError, match="another training"), only_writer(tmp_path / "out", World()):
        pass
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    with only_writer(tmp_path / "out", World()):
        pass


def test_where_there_are_no_locks_nobody_is_refused(tmp_path, monkeypatch):
    def lockf(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with only_writer(tmp_path, World()):
        pass


def filled(folder, epochs=3, total=0, epoch=0):
    """The record of a run of two steps an epoch."""
    record = Record(folder, total, epoch)
    for number in range(epoch + 1, epochs + 1):
        for step in (1, 2):
            place = {"total": 2 * (number - 1) + step, "epoch": number, "step": step}
            record.steps.add(place | {"loss": 1 / number, "lr": 1e-3, "grad_norm": 1.0, "images_per_second": 100.0})
        row = {"epoch": number, "total": 2 * number, "train_loss": 0.5, "val_loss": 0.6, "acc1": 70.0 + number}
        record.epochs.add(row | {"acc5": 99.0, "amax_drift": 0.01, "clipped_share": 1e-4, "seconds": 3.0})


def test_rows_are_written_as_they_come_and_going_on_drops_what_is_done_again_and_a_row_that_was_cut(tmp_path):
    filled(tmp_path)
    steps = [*read_table(tmp_path / "steps.csv")]
    assert [row["total"] for row in steps] == ["1", "2", "3", "4", "5", "6"]
    assert steps[2]["loss"] == "0.5" and steps[2]["lr_amax"] == ""
    assert [row["acc1"] for row in read_table(tmp_path / "epochs.csv")] == ["71", "72", "73"]
    with open(tmp_path / "steps.csv", "a") as file:
        file.write("7,4,1,0.2")
    filled(tmp_path, epochs=2, total=2, epoch=1)
    assert [row["total"] for row in read_table(tmp_path / "steps.csv")] == ["1", "2", "3", "4"]
    assert [row["epoch"] for row in read_table(tmp_path / "epochs.csv")] == ["1", "2"]
    filled(tmp_path, epochs=1)
    assert len([*read_table(tmp_path / "steps.csv")]) == 2


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
