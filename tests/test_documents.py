"""Documents: links lead somewhere, commands parse, those of README and its Python run on a micro model, and tables and
citations are those of the code."""

import re
import runpy
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from nightly import share
from shown import DOCUMENTS, ROOT
from vnni import exact_int8

from swin_quant.base.files import compute_sha256
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CheckpointRecord
from swin_quant.config import load_config
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.models import registry as architectures

README = (ROOT / "README.md").read_text(encoding="utf-8")
NAME = "swin_tiny_patch4_window7_224"
# Options at the end of a line of README that make a command short.
QUICK = {"train": ["--epochs", "1", "--batch", "32"], "finetune": ["--epochs", "1", "--batch", "32"]}
LAUNCHER = "python -m torch.distributed.launch --nproc_per_node 1 --master_port 12345 "


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page):
    """The anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*DOCUMENTS, *ROOT.glob("*.md")], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lost = []
    for link in (first or second for first, second in LINK.findall(text)):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.fixture(scope="module")
def reader(tmp_path_factory, write_config, randomise, pictures) -> Path:
    """A reader's folder: a float checkpoint of a block a stage, `imagenet`, a photo, a folder of photos."""
    folder = tmp_path_factory.mktemp("reader")
    keys = {"EMBED_DIM": 32, "DEPTHS": [1, 1]}  # FasterTransformer takes heads of 32 channels
    config = yaml.safe_load(write_config(folder, "swin", **keys).read_text())
    config["MODEL"]["NAME"] = NAME
    (folder / "model.yaml").write_text(yaml.safe_dump(config))
    cfg = load_config(folder / "model.yaml")
    weights = {k: v for k, v in randomise(build_model(cfg)).state_dict().items() if not k.endswith("_amax")}
    torch.save({"model": weights}, folder / f"{NAME}.pth")
    card = RunCard(NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict())
    record = CheckpointRecord(file=f"{NAME}.pth", sha256=compute_sha256(folder / f"{NAME}.pth"))
    replace(card, checkpoint=record).write(folder / f"{NAME}.json")
    shutil.copytree(pictures, folder / "imagenet")
    for picture in list((pictures / "train").rglob("*.png")):
        for copy in range(1, 8):  # 80 calibrate
            shutil.copy(picture, folder / "imagenet" / "train" / picture.parent.name / f"{copy}_{picture.name}")
    shutil.copytree(pictures / "val" / "cat", folder / "holiday")
    shutil.copy(next((pictures / "val").rglob("*.png")), folder / "photo.jpg")
    return folder


def commands():
    """The lines of the README's bash blocks that start with a command of ours."""
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("swin-quant ") or "main.py" in line:
                yield line.split("  #")[0].strip()


@exact_int8
def test_the_commands_of_the_readme(reader, run, monkeypatch):
    monkeypatch.chdir(reader)
    shown = list(commands())
    assert len(shown) >= 7
    for line in shown:
        words = [word for part in shlex.split(line.replace(LAUNCHER, "")) for word in expanded(part)]
        words += QUICK.get(words[1], [])
        done = run(*words) if words[0] == "main.py" else run(*words[1:])
        assert done.code == 0, (line, done)
    assert (reader / "out" / "report.html").is_file()


def expanded(word):
    """The words as a shell expands them."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def test_the_package_of_docs_extending(install, run, pictures, tmp_path, monkeypatch):
    """Its backend and its architecture, unchanged: calibrated, exported, verified."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"```python\n# (my_package/\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert len(files) == 4
    for name, code in files:
        (tmp_path / "site" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "site" / name).write_text(code)
    install("mine = my_package:BACKEND")
    install("mine_too = my_package.network:ARCHITECTURE", architectures.ENTRY_POINTS)
    model = {"TYPE": "mine", "NAME": "mine", "NUM_CLASSES": 3}
    Path("mine.yaml").write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 32}, "MODEL": model, "TEST": {"CROP": False}}))
    torch.save(build_model(load_config("mine.yaml")).state_dict(), "mine.pth")
    sample = f"--data-path {pictures} --pictures 8 --batch 4 --policy qdq --output out"
    for line in (
        f"calibrate mine.pth --cfg mine.yaml {sample}",
        "export out/mine_calib.pth --for mine --output out",
        f"verify out/mine.mine --data-path {pictures} --pictures 4",
        f"evaluate out/mine.mine --data-path {pictures}",
    ):
        done = run(*line.split())
        assert done.code == 0, (line, done)


@pytest.mark.parametrize("page", share(["README.md", "docs/python.md"], 2))
def test_the_python_of_documents(page, reader, monkeypatch, capsys):
    monkeypatch.chdir(reader)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    names = {"module": torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block.replace("224,", "32,"), page, "exec"), names)
    assert "Δ acc@1" in capsys.readouterr().out and any((reader / "out").glob("*_openvino.onnx"))


@pytest.mark.nightly
def test_the_page_is_what_the_limits_say():
    page = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["page"]()
    assert (ROOT / "docs" / "support.md").read_text() == page, "python scripts/support_matrix.py"
    assert "| best |" in page and "| no (" in page and "unfused" in page


def test_readme_lists_every_backend_as_the_code_describes_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["readme"](text) == text
    assert all(f"| `{name}` | ONNX" in text for name in ("onnx", "openvino")), "a target for any CPU is there"
