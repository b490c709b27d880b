"""How many of the products that a file quantizes run in integers on an engine, by the engine's own optimized graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.backend import function
from swin_quant.backends.onnx_reader.file import open_onnx, read_model
from swin_quant.backends.onnx_reader.inspect.gemms import find_gemms
from swin_quant.backends.onnx_reader.inspect.graph import index
from swin_quant.backends.registry import takers
from swin_quant.base.errors import listed
from swin_quant.base.extras import library

INT8 = "int8"
_ENOUGH = 0.5  # the share of quantized products that have to run in integers for a file to be called int8


@dataclass(frozen=True)
class IntegerProducts:
    """`quantized`: the products that a file quantizes; `integer`: how many run in int8; `floats`: names of others."""

    quantized: int
    integer: int
    floats: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether most of what is quantized runs in float."""
        return self.integer < _ENOUGH * self.quantized

    def __str__(self) -> str:
        rest = f"; in float: {listed(self.floats, 3)}" if self.floats else ""
        return f"{self.integer} of {self.quantized} quantized products run in int8{rest}"


def quantized_products(file: Path, in_functions: bool = True) -> list[str]:
    """The names of the products of an ONNX file whose inputs are both int8.

    `in_functions` False leaves out the products of its local functions, which an engine runs as compiled operators.
    """
    model = read_model(file)
    if not in_functions:
        del model.functions[:]
    return [gemm.node.name for gemm in find_gemms(index(model)) if gemm.int8]


def integer_products(quantized: list[str], ran: Mapping[str, str]) -> IntegerProducts:
    """`ran`: product -> the type that an engine runs it in, as `Engine.details["gemms"]` has it."""
    floats = [name for name in quantized if ran.get(name, INT8) != INT8]
    integer = sum(kind == INT8 for kind in ran.values())
    return IntegerProducts(len(quantized), min(integer, len(quantized)), tuple(floats))


def by_engine(file: Path, engines: tuple[str, ...] = ()) -> dict[str, IntegerProducts]:
    """`<engine> <version>, <batch>` -> the counts of a file on each installed engine that runs ONNX, with its defaults.

    A file for any batch is counted as it is, and with a batch of 1 that is fixed before loading. SwinQuantError where
    an engine cannot load the file.
    """
    quantized = quantized_products(file)
    if not quantized:
        return {}
    opened = open_onnx(file)
    sizes: Mapping[str, Any] = {f"batch {opened.batch}": None} if opened.batch else {"any batch": None, "batch 1": 1}
    return {
        f"{one.name} {library(one.name, '').__version__.partition('-')[0]}, {what}": integer_products(
            quantized, function(one.products)(opened, batch)
        )
        for one in takers("onnx")
        if one.products and one.is_installed and (not engines or one.name in engines)
        for what, batch in sizes.items()
    }
