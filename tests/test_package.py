import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import tomllib

import swin_quant

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF_DEVELOPERS = ("dev", "docs", "notebooks", "ray", "release")
PIN = re.compile(r'(?P<name>[\w.-]+)==[\w.]+(?P<marker> ; python_version (<|>=) "3\.11")?')


def normal(requirement):
    """A requirement's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    return lines


def test_every_requirement_is_pinned():
    project = PROJECT["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    wanted = project["dependencies"] + extras + PROJECT["build-system"]["requires"]
    assert {normal(requirement) for requirement in wanted} - {normal(line) for line in pins()} == set()


def hashed():
    """Name and version of every requirement in requirements.txt; each has a hash."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "requirements.txt").read_text())
    hashes = r"((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+)"
    found = re.findall(rf"(?m)^([\w.-]+)==([\w.]+)(?: ; [^\\]*)? \\\n{hashes}", text)
    assert len(found) == len(re.findall(r"(?m)^\S", text))
    return {(normal(name), version) for name, version, _ in found}


def test_what_is_pinned_with_hashes_is_what_is_pinned():
    pinned = {(normal(line), line.split(" ")[0].partition("==")[2]) for line in pins()}
    names = {name for name, _ in pinned}
    assert {pin for pin in hashed() if pin[0] in names} <= pinned
    project = PROJECT["project"]
    extras = [ones for extra, ones in project["optional-dependencies"].items() if extra not in OF_DEVELOPERS]
    wanted = {normal(requirement) for requirement in sum(extras, project["dependencies"])}
    assert wanted | {"hatchling"} <= {name for name, _ in hashed()}, "make pins"


ALL_COMMANDS = """
import contextlib, io, sys
import swin_quant
from swin_quant.cli import main
from swin_quant.cli.commands import COMMANDS
assert swin_quant.__file__.startswith(sys.argv[1]), swin_quant.__file__
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    assert "Usage: swin-quant " + name in said.getvalue(), name
main(["show", "policies"])
"""


def test_the_wheel_alone_gives_the_commands(tmp_path):
    """Built here or by CI (BUILT), installed and started elsewhere: every command, with all files that it reads."""
    quiet = {"cwd": ROOT, "check": True, "capture_output": True, "text": True}
    place = ROOT / "dist" if "BUILT" in os.environ else tmp_path
    if place == tmp_path:
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], **quiet)
    (wheel,) = place.glob("*.whl")
    assert wheel.name.startswith(f"swin_quant-{swin_quant.__version__}-")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in inside if not name.startswith("swin_quant")]
    ours = {path.relative_to(ROOT).as_posix() for top in ("swin_quant", "configs") for path in (ROOT / top).rglob("*")
            if path.is_file() and not path.suffix == ".pyc"}  # fmt: skip
    assert {name.replace("configs/", "swin_quant/configs/", 1) if name.startswith("configs/") else name
            for name in ours} - inside == set()  # fmt: skip
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel]
    subprocess.run([sys.executable, *install], **quiet)
    site = str(tmp_path / "site")
    command = tmp_path / "site" / "bin" / "swin-quant"
    elsewhere = quiet | {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": site}}
    assert subprocess.run([command, "--version"], **elsewhere).stdout.strip() == swin_quant.__version__
    assert "ft-mode1" in subprocess.run([sys.executable, "-c", ALL_COMMANDS, site], **elsewhere).stdout
