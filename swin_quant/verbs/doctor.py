"""What is installed on this machine, what is broken, and how to mend it."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import engines
from swin_quant.backends.releases import list_faults
from swin_quant.backends.saturation import saturates
from swin_quant.base.cpu import usable_cores
from swin_quant.base.errors import one_line
from swin_quant.cards.card import versions
from swin_quant.operators.plugins import compiler
from swin_quant.report.table import NARROW, Column, Printed, ReportTable, bullets, field, styled

EXAMPLES = """swin-quant doctor
swin-quant doctor --json machine.json"""
_SAFE = "`export --saturation-safe` writes a file whose products cannot (docs/onnx.md)"
_PACKAGES = ("swin-quant", "torch", "timm", "numpy")
_REQUIRED = "pip install -c constraints.txt -e . in the checkout"
_INDEX = "https://download.pytorch.org/whl/cpu"
_CPU_BUILD = (
    f"{sys.executable} -m pip install --force-reinstall --no-deps --index-url {_INDEX} torchvision==%s, or begin "
    "a script with `from swin_quant.base.compat import import_timm` and `import_timm()`"
)


_MARKS = {"good": "ok", "missing": "-", "caution": "!"}
_STYLES = {"good": "", "missing": "dim", "caution": "yellow"}


@dataclass(frozen=True)
class MachineFact:
    """One fact. `state`: good, missing (absent, and not required) or caution; `remedy`: the way to mend it."""

    topic: str
    name: str
    value: str
    state: str = "good"
    remedy: str = ""


@dataclass(frozen=True)
class MachineFacts(Printed):
    """All facts; printed, the things to do, then a table for each topic."""

    found: Sequence[MachineFact]
    in_pipe = NARROW

    def to_json(self) -> dict[str, Any]:
        """The facts as data."""
        return {"schema": "swin-quant/doctor/1", "found": [asdict(one) for one in self.found]}

    def tables(self) -> list[ReportTable[MachineFact]]:
        topics = dict.fromkeys(one.topic for one in self.found)
        return [
            ReportTable(
                (
                    Column[MachineFact]("state", " ", lambda one: _MARKS[one.state]),
                    Column[MachineFact]("name", topic, field("name")),
                    Column[MachineFact]("value", " ", field("value"), fold=True),
                ),
                [one for one in self.found if one.topic == topic],
                style=lambda one: _STYLES[one.state],
            )
            for topic in topics
        ]

    def text(self, width: int, color: bool = False) -> str:
        # The remedy stands behind the value that makes it necessary.
        said = {one.name: (one.value if one.state == "caution" else "", one.remedy) for one in self.found}
        due = [f"{name}: {'; '.join(filter(None, both))}" for name, both in said.items() if any(both)]
        head = "What to do, and what else there is" if due else "Nothing stands in the way."
        lines = [styled(head, "bold" * color), *bullets(due, width)]
        return "".join(f"{line}\n" for line in lines) + "\n" + super().text(width, color)


def doctor() -> MachineFacts:
    """Look at this machine: versions, engines, CPU, compiler, GPU, each with its remedy where it is an obstacle."""
    there = next(iter(importlib.metadata.distributions(name="torchvision")), None)
    version = there.version.partition("+")[0] if there else ""
    build = f"install the build for torch {torch.__version__}: {_CPU_BUILD % version}"
    facts = [_fact("versions", name, partial(importlib.metadata.version, name), _REQUIRED) for name in _PACKAGES]
    facts.append(_fact("versions", "Python", lambda: f"{versions()['python']} on {versions()['platform']}", ""))
    facts.append(_fact("versions", "torchvision", _torchvision, build))
    facts += [_fact("engines", name, partial(_engine, one), one.remedy or "") for name, one in engines().items()]
    facts.append(_fact("machine", "CPU", lambda: f"{versions()['cpu']}, {usable_cores()} cores to use", ""))
    for name in (name for name, one in engines().items() if one.saturation):
        facts.append(_fact("machine", f"{name}, int8", partial(_saturation, name), _SAFE))
    facts.append(_fact("machine", "C++ compiler", compiler, "operators for OpenVINO are compiled by it: install g++"))
    return MachineFacts([*facts, _fact("machine", "GPU", lambda: versions()["gpu"] or "none that torch sees", "")])


def _fact(topic: str, name: str, ask: Callable[[], str], remedy: str) -> MachineFact:
    try:
        return MachineFact(topic, name, one_line(ask()))
    except ModuleNotFoundError:
        return MachineFact(topic, name, "not installed", "missing", remedy)
    except Exception as error:  # noqa: BLE001  (what is broken here is what is asked for)
        return MachineFact(topic, name, one_line(str(error)), "caution", remedy)


def _torchvision() -> str:
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, cwd=sys.prefix)
    if done.returncode:
        raise RuntimeError(f"cannot be imported: {([''] + done.stderr.strip().splitlines())[-1]}")
    return importlib.metadata.version("torchvision")


def _engine(engine: Backend) -> str:
    if engine.needs is None:
        return "simulated, in torch" if engine.emulates else "part of swin-quant"
    if not engine.is_installed:
        raise ModuleNotFoundError
    version = str(getattr(importlib.import_module(engine.needs[0]), "__version__", "of an unknown version"))
    if wrong := list(list_faults(engine.name, version.partition("-")[0])):
        raise RuntimeError(f"{version}, which {'; '.join(wrong)}")
    return version


def _saturation(name: str) -> str:
    if saturates(name):
        raise RuntimeError("no VNNI: products saturate at 16 bits, which costs accuracy")
    return "products are exact" if saturates(name) is False else "whether products saturate is not known of this CPU"
