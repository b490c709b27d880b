"""What the README shows works: its commands and its Python, in their order, on a micro model of the name it uses."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from swin_quant.base.files import sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CheckpointRecord
from swin_quant.cli import GROUPS
from swin_quant.config import load_config
from swin_quant.config.portable import portable_config
from swin_quant.data.preprocess import Preprocess

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NAME = "swin_tiny_patch4_window7_224"
QUICK = {
    "bench": ["--rounds", "1", "--seconds", "0.01", "--batch", "1"],
    "sensitivity": ["--pictures", "4"],
    "finetune": ["--epochs", "1", "--batch", "32"],
}
LAUNCHER = "python -m torch.distributed.launch --nproc_per_node 1 --master_port 12345 "


@pytest.fixture(scope="module")
def reader(tmp_path_factory, micro, pictures) -> Path:
    """The folder of a reader: a float checkpoint, `imagenet`, a photo, a folder of them."""
    folder = tmp_path_factory.mktemp("reader")
    config = yaml.safe_load((micro / "swin.yaml").read_text())
    config["MODEL"]["NAME"] = NAME
    file = folder / "configs" / "swin" / f"{NAME}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(config))
    weights = Path(shutil.copy(micro / "swin.pth", folder / f"{NAME}.pth"))
    cfg = load_config(file)
    card = RunCard(NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict())
    replace(card, checkpoint=CheckpointRecord(file=weights.name, sha256=sha256_of(weights))).write(
        weights.with_suffix(".json")
    )
    shutil.copytree(pictures, folder / "imagenet")
    for picture in list((pictures / "train").rglob("*.png")):
        for copy in range(1, 8):  # 80 calibrate
            shutil.copy(picture, folder / "imagenet" / "train" / picture.parent.name / f"{copy}_{picture.name}")
    shutil.copytree(pictures / "val" / "cat", folder / "holiday")
    shutil.copy(next((pictures / "val").rglob("*.png")), folder / "photo.jpg")
    return folder


def commands():
    """The lines of the README's bash blocks that start a command of ours."""
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("swin-quant ") or "main.py" in line:
                yield line.split("  #")[0].strip()


def test_the_commands_of_the_readme(reader, run, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.chdir(reader)
    shown = list(commands())
    assert len(shown) >= 12
    for line in shown:
        words = [word for part in shlex.split(line.replace(LAUNCHER, "")) for word in expanded(part)]
        words += QUICK.get(words[1], [])
        done = run(*words) if words[0] == "main.py" else run(*words[1:])
        assert done.code == 0, (line, done)
    assert (reader / "out" / "table" / "accuracy.md").is_file()


def expanded(word):
    """As a shell does it."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def test_every_group_of_commands_is_shown():
    assert all(f"swin-quant {group}" in README for group in GROUPS)


def test_the_python_of_the_readme(reader, monkeypatch, capsys):
    pytest.importorskip("openvino")
    monkeypatch.chdir(reader)
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        block = block.replace("layers.3", "layers.1")  # the micro model has two stages
        exec(compile(block, "README.md", "exec"), {"images": torch.zeros(2, 3, 32, 32)})
    assert "Δ acc@1" in capsys.readouterr().out and (reader / "out" / "mine.pth").is_file()
