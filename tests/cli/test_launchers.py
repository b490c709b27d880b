"""The commands of the issue and the guide, each started in its own processes as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import free_port

ROOT = Path(__file__).parents[2]


LAUNCHERS = {
    "launch": ["-m", "torch.distributed.launch", "--nproc_per_node", "1", "--master_port"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"],
    "plain": [],
}


@pytest.fixture
def calibrate(micro, pictures, tmp_path):
    """calibrate(launcher) -> the end of main.py --calib under it, with FasterTransformer's flags; the files go to the
    folder of the launcher's name. Two threads where the launcher sets none."""
    flags = f"main.py --calib --cfg {micro / 'swin.yaml'} --resume {micro / 'swin.pth'} --data-path {pictures}"
    flags += f" --num-calib-batch 3 --calib-batchsz 4 --int8-mode 1 --output {tmp_path / 'output'} --device cpu"
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RANK")}

    def go(name):
        launcher = [*LAUNCHERS[name], free_port()] if LAUNCHERS[name] else []
        words = [sys.executable, *launcher, *flags.split(), "--calib-output-path", str(tmp_path / name)]
        return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    return go


def test_the_line_of_fastertransformer_s_guide_runs_to_its_last_line(calibrate, tmp_path):
    """As the guide starts it: torch.distributed.launch, one process."""
    done = calibrate("launch")
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1].startswith("Accuracy of the network on the 7 test images: ")
    assert (tmp_path / "launch" / "swin_micro_calib.pth").is_file()


@pytest.mark.nightly
def test_every_launcher_starts_main_py_and_gives_the_same_bits(calibrate, tmp_path):
    ends = {name: calibrate(name) for name in LAUNCHERS}
    assert {name: done.returncode for name, done in ends.items()} == dict.fromkeys(ends, 0), ends
    assert [done.stdout.count("7 pictures") for done in ends.values()] == [1, 1, 1]  # rank 0 alone prints the table
    last = [done.stdout.splitlines()[-1] for done in ends.values()]
    assert all(line.startswith("Accuracy of the network on the 7 test images: ") for line in last), last
    files = [tmp_path / name / "swin_micro_calib.pth" for name in ends]
    assert len({file.read_bytes() for file in files}) == 1
    cards = [json.loads(file.with_suffix(".json").read_text()) for file in files]
    for card in cards:
        assert card["calibration"] == cards[0]["calibration"]
        for one, other in zip(card["results"], cards[0]["results"], strict=True):
            assert all(one[key] == other[key] for key in ("pictures", "acc1", "agreement"))
    assert {result["pictures"] for result in cards[1]["results"]} == {7}


def test_calibrate_py_is_the_command(micro, pictures, tmp_path):
    words = [sys.executable, "calibrate.py", "--cfg", micro / "swin.yaml", "--checkpoint", tmp_path / "no.pth"]
    words += ["--data-path", pictures]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {tmp_path / 'no.pth'}: no such")
