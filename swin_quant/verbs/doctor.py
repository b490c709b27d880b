"""What is installed on this machine, what is broken, and how to mend it."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from swin_quant.backends.registry import engines
from swin_quant.backends.releases import list_faults
from swin_quant.backends.saturation import saturates
from swin_quant.base.cpu import usable_cores
from swin_quant.base.errors import one_line
from swin_quant.cards.card import versions
from swin_quant.operators.plugins import compiler

EXAMPLES = "swin-quant doctor\nswin-quant doctor --json machine.json"
_INSTALL = "pip install -c constraints.txt -e . in the checkout"
_BUILD = "-m pip install --force-reinstall --no-deps --index-url https://download.pytorch.org/whl/cpu"
_BUILD += f" 'torchvision==0.{int(torch.__version__.split('.')[1]) + 15}.*'"  # 0.28 is made for torch 2.13
_SAFE = "`export --saturation-safe` writes a file whose products cannot (docs/onnx.md)"


class MachineFact(NamedTuple):
    """What one part of this machine is; where it is missing or broken, the way to mend it."""

    name: str
    value: str
    is_good: bool
    remedy: str = ""
    is_absent: bool = False  # not installed, which is no fault


class MachineFacts(list[MachineFact]):
    """All facts; printed, a line each: `ok`, `!` for what is broken, `-` for what is not installed."""

    def to_json(self) -> list[dict[str, Any]]:
        """The facts as data."""
        return [one._asdict() for one in self]

    def __str__(self) -> str:
        marks = ("ok" if one.is_good else "- " if one.is_absent else "! " for one in self)
        lines = (f"{one.name}: {'; '.join(filter(None, (one.value, one.remedy)))}" for one in self)
        return "\n".join(map(" ".join, zip(marks, lines, strict=True)))


def doctor() -> MachineFacts:
    """Look at this machine: versions, engines, CPU, compiler, GPU, each with its remedy where it is an obstacle."""
    asked: list[tuple[str, Callable[[], str], str]] = [
        ("Python", lambda: f"{versions()['python']} on {versions()['platform']}", ""),
        *((name, partial(version, name), _INSTALL) for name in ("swin-quant", "torch", "timm", "numpy")),
        ("torchvision", partial(_version, "torchvision"), f"{sys.executable} {_BUILD}"),
        *((name, partial(_version, one.needs[0]), one.remedy) for name, one in engines().items() if one.needs),
        ("CPU", lambda: f"{versions()['cpu']}, {usable_cores()} cores to use", ""),
        *((f"{name}, int8", partial(_saturation, name), _SAFE) for name, one in engines().items() if one.saturation),
        ("C++ compiler", compiler, "operators for OpenVINO are compiled by it: install g++"),
        ("GPU", lambda: versions()["gpu"] or "none that torch sees", ""),
    ]
    found = MachineFacts()
    for name, ask, remedy in asked:
        try:
            found.append(MachineFact(name, one_line(ask()), True))
        except Exception as error:  # noqa: BLE001  (what is broken here is what is asked for)
            is_absent = isinstance(error, ModuleNotFoundError)
            found.append(MachineFact(name, one_line(str(error)), False, remedy, is_absent))
    return found


def _version(package: str) -> str:
    found = str(getattr(importlib.import_module(package), "__version__", "of an unknown version"))
    if wrong := list(list_faults(package, found.partition("-")[0])):
        raise RuntimeError(f"{found}, which {'; '.join(wrong)}")
    return found


def _saturation(name: str) -> str:
    if saturates(name):
        raise RuntimeError("no VNNI: products saturate at 16 bits, which costs accuracy")
    return "products are exact" if saturates(name) is False else "whether products saturate is not known of this CPU"
