"""swin-quant package: a folder that runs where neither torch nor this package can be imported."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from nightly import share
from PIL import Image

from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.saturation import SAFE_ON
from swin_quant.base.files import compute_sha256
from swin_quant.data.folder import NamedPictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import load_engines
from swin_quant.score.options import EngineOptions

FORBIDDEN = "torch", "swin_quant", "timm", "onnx"
ALONE = """
import importlib.abc, runpy, sys
class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Refusing())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def alone(*words, before="", forbidden=FORBIDDEN):
    """Run a script in another process, which starts with an empty path and may import nothing that is forbidden."""
    command = [sys.executable, "-c", f"{before}\nFORBIDDEN = {forbidden}\n{ALONE}", *map(str, words)]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd="/")


def expected(artifact, engine, files):
    """Logits of our engine on our preprocessing, one picture at a time as in infer.py."""
    opened = open_artifact(artifact)
    (engine,) = load_engines(opened, [engine], EngineOptions(threads=1)).values()
    transform = Preprocess.from_dict(opened.card.preprocess)
    pictures = NamedPictures(list(map(str, files)))
    return np.concatenate([engine(transform(pictures.read(i))[None]).numpy() for i in range(len(files))])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_infer_gives_our_logits_without_torch_and_without_us(_exports, run, pictures, tmp_path, engine):
    """An int8 Swin gives them to the bit."""
    exported, packaged = _exports.onnx, tmp_path / "package"
    (tmp_path / "names.txt").write_text("cat\ndog\nfox\n")
    assert run("package", exported, "--labels", tmp_path / "names.txt", "--output", packaged).code == 0
    files = sorted((pictures / "val").rglob("*.png"))[:3]
    done = alone(packaged / "infer.py", *files, "--engine", engine, "--threads", 1, "--save", tmp_path / "out.npy")
    assert done.returncode == 0, done.stderr
    ours = expected(exported, engine, files)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), ours)
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == list(map(str, files))
    best = [line.split(": ")[1].split("%")[0].rsplit(" ", 1)[0] for line in lines]
    assert best == [("cat", "dog", "fox")[row.argmax()] for row in ours]


@pytest.mark.parametrize(("target", "other"), share([("openvino", "onnxruntime"), ("onnxruntime", "openvino")], 2))
def test_infer_runs_the_engine_that_the_file_was_exported_for(run, remade, pictures, tmp_path, target, other):
    """The other engine is there, too, and of no use."""
    run("package", remade(options={"target": target}).file, "--output", tmp_path / "package").ok()
    useless = f"""
import importlib.machinery, sys, types
sys.modules[{other!r}] = types.ModuleType({other!r})
sys.modules[{other!r}].__spec__ = importlib.machinery.ModuleSpec({other!r}, None)
"""
    picture = next((pictures / "val").rglob("*.png"))
    done = alone(tmp_path / "package" / "infer.py", picture, before=useless)
    assert done.returncode == 0, done.stderr


def test_infer_names_what_was_not_copied_with_it(packaged, tmp_path):
    copy = shutil.copytree(packaged, tmp_path / "package")
    for lost in ("models/the_means/1/model.onnx", "package.json"):
        (copy / lost).unlink()
        done = alone(copy / "infer.py", tmp_path / "x.png")
        assert (done.returncode, done.stderr) == (1, f"error: {lost} is not in {copy}: copy the whole package\n")


def test_the_package_lists_its_files_with_their_hashes(packaged, exported):
    about = json.loads((packaged / "package.json").read_text())
    files = {path.relative_to(packaged).as_posix() for path in packaged.rglob("*") if path.is_file()}
    assert files == set(about["files"]) | {"package.json"}
    assert all(compute_sha256(packaged / name) == sha256 for name, sha256 in about["files"].items())
    assert about["model"] == "models/the_means/1/model.onnx"
    assert (packaged / about["model"]).read_bytes() == exported.read_bytes()
    assert (packaged / about["labels"]).read_text() == "cat\ndog\nfox\n"
    assert json.loads((packaged / "card.json").read_text())["artifact"]["sha256"] == compute_sha256(exported)
    assert "${" not in (packaged / "README.md").read_text()
    assert json.loads((packaged / "preprocess.json").read_text()) == {
        "resize": [32, 32], "crop": None, "interpolation": "bicubic", "colours": "RGB", "scale": 255,
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "layout": "NCHW", "type": "float32",
    }  # fmt: skip


SPY = """
import onnxruntime, sys
real = onnxruntime.InferenceSession
def spy(model, settings, **how):
    print(settings.get_session_config_entry("session.x64quantprecision"))
    return real(model, settings, **how)
onnxruntime.InferenceSession = spy
"""


@pytest.mark.parametrize(
    ("safe", "engines"), [([], "onnxruntime and openvino"), (["onnxruntime"], "openvino"), (None, None)]
)
def test_a_package_saturates_no_more_than_our_engine_does(run, remade, pictures, tmp_path, safe, engines):
    """It sets the engine's options for any CPU, and names a risk that no option avoids."""
    made = remade(None, "int8" if engines else "float32", {} if safe is None else {SAFE_ON: safe})
    run("package", made.file, "--output", tmp_path / "package").ok()
    text = " ".join((tmp_path / "package" / "README.md").read_text().split())
    assert (f"saturate at 16 bits in {engines}:" in text) if engines else ("saturate" not in text)
    setting = "session.x64quantprecision"
    assert ("--saturation-safe" in text, setting in text) == (bool(engines), safe == [])
    assert (setting in (tmp_path / "package" / "cpp" / "settings.h").read_text()) == (safe == [])
    if safe == []:
        picture = next((pictures / "val").rglob("*.png"))
        done = alone(tmp_path / "package" / "infer.py", picture, "--engine", "onnxruntime", before=SPY)
        assert done.returncode == 0 and done.stdout.splitlines()[0] == "1", done.stderr


def test_names_that_no_text_can_hold_are_escaped(run, exported, remade, tmp_path):
    """Class names in the file and the policy's name in the card may both come from a stranger."""
    model = onnx.load(exported)
    (labels,) = [entry for entry in model.metadata_props if entry.key == "swin_quant.labels"]
    labels.value = json.dumps(["cat", "d\ud800g", "red\nfox"])
    run("package", remade(model, policy={"name": "q\ud800"}).file, "--output", tmp_path / "package").ok()
    about = json.loads((tmp_path / "package" / "package.json").read_text())
    assert (tmp_path / "package" / about["labels"]).read_text() == "cat\nd\\ud800g\nred\\nfox\n"
    assert "q\\ud800" in (tmp_path / "package" / "README.md").read_text()


def test_a_folder_that_is_there_is_left_alone(run, packaged, exported, tmp_path, snapshot):
    before = snapshot(packaged)
    line = run("package", exported, "--output", packaged).error(2)
    assert "is there already" in line and "--overwrite" in line
    assert snapshot(packaged) == before
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    assert "something else than a package" in run("package", exported, "--output", precious, "--overwrite").error(2)
    assert snapshot(precious) == {"thesis.txt": b"years"}
    assert "is no folder" in run("package", exported, "--output", precious / "thesis.txt", "--overwrite").error(2)


def test_a_package_is_replaced_as_a_whole(run, exported, tmp_path):
    (tmp_path / "new").mkdir()  # an empty folder is replaced
    assert run("package", exported, "--output", tmp_path / "new").code == 0
    (tmp_path / "new" / "stray.txt").write_text("old")
    done = run("package", exported, "--output", tmp_path / "new", "--overwrite", "--max-batch", 7)
    assert done.code == 0 and done.out.strip() == str(tmp_path / "new")
    assert not (tmp_path / "new" / "stray.txt").exists()
    assert "max_batch_size: 7" in (tmp_path / "new" / "models" / "the_means" / "config.pbtxt").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_disk_that_fails_leaves_what_was_there(run, packaged, exported, tmp_path, monkeypatch, snapshot):
    folder = tmp_path / "package"
    shutil.copytree(packaged, folder)
    before = snapshot(folder)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "no space", "somewhere")

    monkeypatch.setattr("swin_quant.ship.shutil.copytree", full)
    assert "the disk is full" in run("package", exported, "--output", folder, "--overwrite").error(1)
    assert snapshot(folder) == before and [path.name for path in tmp_path.iterdir()] == ["package"]
    line = run("package", exported, "--output", tmp_path / "other").error(1)
    assert "cannot be written" in line and not (tmp_path / "other").exists()


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_an_interrupt_leaves_the_old_package_or_the_new_one(
    run, packaged, exported, tmp_path, monkeypatch, snapshot, moved
):
    """Interrupted after 0, 1 or 2 renames."""
    folder = tmp_path / "package"
    shutil.copytree(packaged, folder)
    before, rename, done = snapshot(folder), Path.rename, []

    def interrupted(self, target):
        if len(done) == moved:
            done.append(None)
            raise KeyboardInterrupt
        done.append(rename(self, target))
        if moved == 2 == len(done):
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    assert run("package", exported, "--output", folder, "--overwrite", "--max-batch", 7).code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
    assert (snapshot(folder) == before) is (moved < 2)
    assert (folder / "package.json").is_file()


def test_words_that_do_not_fit(run, exported, tmp_path):
    two = tmp_path / "two.txt"
    two.write_text("a\nb\n")
    for words, message in (
        (["--max-batch", 0], "--max-batch 0: must be from 1"),
        (["--delay-us", -1], "--delay-us -1: must be from 0"),
        (["--instances", 99999], "--instances 99999: must be from 1 to"),
        (["--labels", two], "has 2 names, the model 3 classes"),
    ):
        assert message in run("package", exported, "--output", tmp_path / "out", *words).error(2)
        assert not (tmp_path / "out").exists()


def test_only_onnx_and_programs_are_packaged(run, _exports, tmp_path):
    line = run("package", _exports.ft, "--output", tmp_path / "out").error(2)
    assert "only ONNX files and ExecuTorch programs are packaged" in line and not (tmp_path / "out").exists()


def test_pictures_of_every_mode_are_prepared_to_the_bit(tmp_path):
    """The reference implementation against torchvision's transforms, by resize rule, method, mode and odd sizes."""
    from swin_quant.base.files import configs_dir

    namespace = {"__name__": "reference", "__file__": str(tmp_path / "preprocess.py")}
    (tmp_path / "preprocess.json").write_text("{}")
    source = (configs_dir() / "package" / "preprocess.py").read_text()
    exec(compile(source, "preprocess.py", "exec"), namespace)
    random = np.random.default_rng(0)
    sizes = [(57, 33), (33, 57), (40, 40), (256, 81), (31, 100)]
    files = []
    for number, (mode, kind) in enumerate(
        [("RGB", "jpg"), ("RGB", "png"), ("L", "jpg"), ("RGBA", "png"), ("P", "gif"), ("I;16", "png"), ("CMYK", "jpg")]
    ):
        width, height = sizes[number % len(sizes)]
        pixels = random.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3)).astype(np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        if mode == "I;16":
            image = Image.fromarray(random.integers(0, 65536, (height, width)).astype(np.uint16))
        elif mode != "RGB":
            image = image.convert(mode)
        files.append(tmp_path / f"{number}.{kind}")
        image.save(files[-1])
    small, exif = random.integers(0, 256, (20, 30)), Image.Exif()
    exif[0x0112] = 6
    for name, kind, more in (("i.tif", np.int32, {}), ("e.png", np.uint8, {"exif": exif})):
        files.append(tmp_path / name)
        Image.fromarray(small.astype(kind)).save(files[-1], **more)
    pictures = NamedPictures(list(map(str, files)))
    for crop, ratio, method, size, *shape in [
        (False, 0.875, "bicubic", 32), (True, 0.875, "bicubic", 32), (True, 0.9, "bilinear", 24),
        (True, 1.0, "lanczos", 31), (False, 0.875, "nearest", 48), (True, 0.95, "box", 33),
        (True, 0.9, "bicubic", 32, "floored"), (True, 0.8, "bicubic", 24, "squashed"),
        (True, 0.9, "bicubic", (24, 40)), (False, 0.875, "bilinear", (40, 24)),
        (True, 0.9, "bicubic", (41, 25), "floored"),
    ]:  # fmt: skip
        transform = Preprocess(size, crop, method, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), ratio, *shape)
        sides = size if isinstance(size, tuple) else (size, size)
        pair = not crop or shape == ["squashed"] or size != sides[0]
        both = [int(side / ratio) if crop else side for side in sides]
        settings = {"resize": both if pair else both[0], "covers": crop and size != sides[0],
                    "crop": size if crop else None, "crop_offset": "rounded down" if shape == ["floored"] else None,
                    "interpolation": method, "mean": transform.mean, "std": transform.std,
                    "type": "float32", "upright": sides[0] > 32}  # fmt: skip
        for index, file in enumerate(files):
            ours = transform(pictures.read(index, sides[0] > 32)).numpy()
            np.testing.assert_array_equal(namespace["preprocess"](file, settings), ours, err_msg=f"{file} {settings}")


def test_the_example_in_c_gives_the_same_logits(packaged, exported, pictures, tmp_path):
    """CMake compiles it against OpenVINO's headers, which its wheel has; ONNX Runtime's has none."""
    place = f"-DOpenVINO_DIR={Path(openvino.__file__).parent / 'cmake'}"
    if not shutil.which("cmake") or not shutil.which("g++"):
        pytest.skip("needs cmake and g++")
    files = sorted((pictures / "val").rglob("*.png"))[:2]
    raw = b""
    for number, file in enumerate(files):
        one = tmp_path / f"{number}.bin"
        assert alone(packaged / "preprocess.py", file, one).returncode == 0
        raw += one.read_bytes()
    (tmp_path / "input.bin").write_bytes(raw)
    for words in (["-S", packaged / "cpp", "-B", tmp_path / "build", place], ["--build", tmp_path / "build"]):
        done = subprocess.run(["cmake", *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    program = [tmp_path / "build" / "infer_openvino", packaged / "models" / "the_means" / "1" / "model.onnx"]
    how = {"capture_output": True, "text": True}
    done = subprocess.run([*program, tmp_path / "input.bin"], **how)
    assert done.returncode == 0, done.stderr
    found = np.array(done.stdout.split(), np.float32).reshape(2, 3)
    np.testing.assert_array_equal(found, expected(exported, "openvino", files))
    (tmp_path / "short.bin").write_bytes(raw[:-1])
    done = subprocess.run([*program, tmp_path / "short.bin"], **how)
    assert done.returncode == 1 and done.stderr.startswith("error: INPUT does not hold whole pictures")
