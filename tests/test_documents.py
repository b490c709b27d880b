"""Everything that documents show works, on micro models: commands of README, docs and --help in order, README's
Python. Its tables and citations are those of the code."""

import re
import runpy
import shlex
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from draws import drawn
from safetensors.torch import save_file
from shown import DOCUMENTS, FILES, ROOT, shell_lines

from swin_quant.backends.fastertransformer.tuner import write_tuned
from swin_quant.base.files import configs_dir, sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CheckpointRecord
from swin_quant.checkpoint import identify
from swin_quant.cli import main
from swin_quant.cli.commands import FRONT_DOOR
from swin_quant.config import load_config
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.models import registry as architectures

README = (ROOT / "README.md").read_text(encoding="utf-8")
NAME, CLASSES = "swin_tiny_patch4_window7_224", ("cat", "dog", "fox")
# Options at the end of a line that make a command short.
QUICK = {
    "bench": ["--rounds", "1", "--seconds", "0.01", "--batch", "1"],
    "calibrate my.pth": ["--pictures", "4"],
    "sensitivity": ["--pictures", "4"],
    "search": ["--pictures", "4", "--min-sqnr", "0"],
    "train": ["--epochs", "1", "--batch", "32"],
    "finetune": ["--epochs", "1", "--batch", "32"],
    "ft front-door --train": ["--num-epochs", "1", "--batch-size", "32"],
}
# Commands that are not run here, and why; test_flags parses these too.
NOT_RUN = {
    "build-engine": "needs TensorRT; test_build_engine has a stand-in",
    "serve": "serves until it is told to end; test_serve does",
    "demo": "trains for a minute; test_demo cuts it short",
    "search": "an export for each group of layers; test_search runs it",
    "quantize my.pth --data-path imagenet --for openvino --policy auto": "searches; test_search",
    "bench out/my_": "a process an engine, a file a baseline; test_bench runs both",
    "finetune ... --continue": "a line of any of the others",
    "verify out/.../my_int8_sm80.safetensors": "a line that leaves out a folder; verify's own examples are run",
    "export out/swin_large_calib.pth": "full size: 200 million weights",
    "calibrate timm:resnet50": "weights of the hub's; test_any_model goes all the way with micro ones",
    "calibrate resnet50.pth": "the same, from a file",
    "export out/resnet50_calib.pth": "the same",
}
RUN = set()  # lines of earlier documents
LAUNCHER = "python -m torch.distributed.launch --nproc_per_node 1 --master_port 12345 "


@pytest.fixture(scope="module")
def reader(tmp_path_factory, write_config, randomise, pictures) -> Path:
    """A reader's folder: a float checkpoint of a block a stage, `imagenet`, a photo, a folder of photos."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs" / "swin").mkdir(parents=True)
    keys = {"EMBED_DIM": 32, "DEPTHS": [1, 1]}  # FasterTransformer takes heads of 32 channels
    config = yaml.safe_load(write_config(folder, "swin", **keys).read_text())
    add_checkpoint(folder, config, f"configs/swin/{NAME}", NAME, randomise)
    shutil.copytree(pictures, folder / "imagenet")
    for picture in list((pictures / "train").rglob("*.png")):
        for copy in range(1, 8):  # 80 calibrate
            shutil.copy(picture, folder / "imagenet" / "train" / picture.parent.name / f"{copy}_{picture.name}")
    shutil.copytree(pictures / "val" / "cat", folder / "holiday")
    shutil.copy(next((pictures / "val").rglob("*.png")), folder / "photo.jpg")
    return folder


def add_checkpoint(folder, config, place, name, randomise):
    """Write the config of the model with that name at `place`, its weights and their run card into the folder."""
    config["MODEL"]["NAME"] = name
    (folder / f"{place}.yaml").write_text(yaml.safe_dump(config))
    cfg = load_config(folder / f"{place}.yaml")
    weights = {k: v for k, v in randomise(build_model(cfg)).state_dict().items() if not k.endswith("_amax")}
    torch.save({"model": weights}, folder / f"{name}.pth")
    card = RunCard(name, portable_config(cfg), Preprocess.from_config(cfg).to_dict())
    record = CheckpointRecord(file=f"{name}.pth", sha256=sha256_of(folder / f"{name}.pth"))
    replace(card, checkpoint=record).write(folder / f"{name}.json")
    return weights


@pytest.fixture(scope="module")
def shelf(reader, tmp_path_factory, randomise):
    """The folder of a user who tries the documents: all files that they name, from micro models. Copy it."""
    folder = tmp_path_factory.mktemp("shelf") / "shelf"
    shutil.copytree(reader, folder, ignore=shutil.ignore_patterns("out*"))
    config = yaml.safe_load((folder / "configs" / "swin" / f"{NAME}.yaml").read_text())
    weights = add_checkpoint(folder, config, "my", "my", randomise)
    for suffix in (".pth", ".json"):
        shutil.copy(folder / f"{NAME}{suffix}", folder / f"swin_tiny{suffix}")
    save_file(weights, folder / "timm_swin_tiny.safetensors")
    shutil.copy(folder / "photo.jpg", folder / "cat.jpg")
    shutil.copytree(folder / "holiday", folder / "more")
    for picture in (folder / "holiday").glob("*.png"):
        shutil.copy(picture, picture.with_suffix(".jpg"))
    for name in ("data", "cifar10", "CIFAR10_FOLDER"):  # as folders and in a zip
        shutil.copytree(folder / "imagenet", folder / name)
        for split in ("train", "val"):
            files = sorted((folder / name / split).rglob("*.png"))
            with zipfile.ZipFile(folder / name / f"{split}.zip", "w") as archive:
                for file in files:
                    archive.write(file, f"{file.parent.name}_{file.name}")
            lines = [f"{file.parent.name}_{file.name}\t{CLASSES.index(file.parent.name)}\n" for file in files]
            (folder / name / f"{split}_map.txt").write_text("".join(lines))
    for name in ("igemm_config.in", "a.in", "b.in"):
        write_tuned(folder / name, [])
    calibrated = "out/my_calib.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ours("calibrate my.pth --cfg my.yaml --data-path imagenet --policy ft-mode1 --output out")
        ours(f"calibrate {NAME}.pth --data-path imagenet --policy ft-mode1 --output out")
        ours(f"export {calibrated} --for onnx --policy qdq --output out")
        ours(f"export {calibrated} --for onnx --precision float --output out")
        ours(f"export {calibrated} --for openvino --policy cpu --output out")
        shutil.copy(calibrated, "theirs_calib.pth")
        for name in ("swin_tiny_int8.onnx", "swin_tiny_int8_tensorrt.onnx"):
            shutil.copy("out/my_int8.onnx", f"out/{name}")
        shutil.copy("out/my_fp32.onnx", "some_swin_of_timm.onnx")
        shutil.copy(configs_dir() / "policies" / "cpu.yaml", "out/my_auto_openvino.yaml")  # as `search` writes one
        for folder_of_results in ("out/mode1", "out/mode2"):
            Path(folder_of_results).mkdir()
            for suffix in (".pth", ".json"):
                shutil.copy(f"out/{NAME}_calib{suffix}", folder_of_results)
    return folder


def ours(line):
    assert main(shlex.split(line)) == 0, line


BY_DOCUMENT = [path for path in FILES if path.name != "README.md" and any(shell_lines(path))]


@pytest.mark.slow
@pytest.mark.parametrize("path", drawn(BY_DOCUMENT, 2), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_documents_and_help_show_can_be_done(path, shelf, run, tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    folder = tmp_path / "shelf"
    shutil.copytree(shelf, folder)
    monkeypatch.chdir(folder)
    config = folder / "configs" / "swin" / f"{NAME}.yaml"
    monkeypatch.setattr("swin_quant.config.load.shipped_configs", lambda: {NAME: config})
    monkeypatch.setattr(identify, "_shipped", lambda: (identify._candidate(NAME, config),))
    lines = [(command, words, f"{command} {shlex.join(words)}") for command, words in shell_lines(path)]
    for number, (command, words, line) in enumerate(lines):
        later = [after for _, _, after in lines[number + 1 :]]
        if any(line.startswith(known) for known in NOT_RUN) or line in RUN and not is_read(words, later):
            continue
        RUN.add(line)
        words = [word for part in shlex.split(" ".join(words).split(" > ")[0]) for word in expanded(part)]
        words += next((more for known, more in QUICK.items() if line.startswith(known)), [])
        done = run("main.py", *words) if command == FRONT_DOOR else run(*command.split(), *words)
        assert done.code == 0, (line, done)
        shutil.rmtree("output", ignore_errors=True)  # two lines are two ways, not one after the other


def is_read(words, later):
    """Whether later lines read what this one writes; what lies in `out` is on the shelf."""
    output = words[words.index("--output") + 1] if "--output" in words else "out"
    return output != "out" and any(f"{output}/" in line for line in later)


def test_what_is_not_run_is_still_shown():
    shown = [f"{command} {shlex.join(words)}" for path in BY_DOCUMENT for command, words in shell_lines(path)]
    assert [known for known in NOT_RUN if not any(line.startswith(known) for line in shown)] == []


def commands():
    """The lines of the README's bash blocks that start with a command of ours."""
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("swin-quant ") or "main.py" in line:
                yield line.split("  #")[0].strip()


@pytest.mark.slow
def test_the_commands_of_the_readme(reader, run, monkeypatch):
    pytest.importorskip("openvino")
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


DIALECT = re.compile(r"(?:\A|\n\n|[.;!?]\s|\*\*\s)\s*((?:Of|What|That which|Those|Others|Who|Whose)\b[^.?]*[.?])")
PROSE = [path for path in DOCUMENTS if "results" not in path.parts]


def test_sentences_begin_with_their_noun():
    """CONTRIBUTING's rule; a question may begin with What or Who."""
    wrong = []
    for path in PROSE:
        prose = re.sub(r"```.*?```|^#.*?$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        wrong += [(path.name, found) for found in DIALECT.findall(prose) if not found.endswith("?")]
    assert wrong == []


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
    sample = f"--data-path {pictures} --pictures 8 --batch 4 --policy qdq --half none --output out"
    for line in (
        f"calibrate mine.pth --cfg mine.yaml {sample}",
        "export out/mine_calib.pth --for mine --output out",
        f"verify out/mine.mine --data-path {pictures} --pictures 4",
        f"evaluate out/mine.mine --data-path {pictures}",
    ):
        done = run(*line.split())
        assert done.code == 0, (line, done)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_of_documents(page, reader, monkeypatch, capsys, engines_here):
    pytest.importorskip("openvino")
    monkeypatch.chdir(reader)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    names = {"module": torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block.replace("224,", "32,"), page, "exec"), names)
    assert "Δ acc@1" in capsys.readouterr().out and any((reader / "out").glob("*_int8_openvino.onnx"))


@pytest.mark.slow
def test_the_page_is_what_the_limits_say():
    page = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["page"]()
    assert (ROOT / "docs" / "support.md").read_text() == page, "python scripts/support_matrix.py"
    assert "| best |" in page and "| no (" in page and "unfused" in page


def test_readme_lists_every_backend_as_the_code_describes_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["readme"](text) == text
    assert all(f"| `{name}` | ONNX" in text for name in ("onnx", "openvino")), "a target for any CPU is there"


HEADINGS = set(
    re.findall(r"^##? ([0-9]+(?:\.[0-9]+)?) ", "\n".join(p.read_text() for p in ROOT.glob("docs/reference/*.md")), re.M)
)
CITATION = re.compile(r"docs/reference,\s+sections?\s+([0-9., and to\n]+)")


@pytest.mark.parametrize("folder", ["swin_quant", "tests", "configs", "benchmarks"])
def test_sections_that_are_cited_exist(folder):
    files = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]
    cited = {
        (str(file.relative_to(ROOT)), number)
        for file in files
        for numbers in CITATION.findall(file.read_text())
        for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", numbers)
    }
    tops = {heading.partition(".")[0] for heading in HEADINGS}
    assert {(file, number) for file, number in cited if number not in HEADINGS | tops} == set()


def test_nothing_cites_what_readers_do_not_have():
    files = [
        file
        for folder in ("swin_quant", "configs")
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in (".py", ".yaml")
    ]
    assert [
        file.name for file in files if re.search(r"spec,\s+section|quantizer_base|anchors B", file.read_text())
    ] == []
