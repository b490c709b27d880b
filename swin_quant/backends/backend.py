"""A backend as data: its export, the artifacts that its engine runs, and the other facts that commands need.

A descriptor costs nothing to import: functions are named as "module:function" and imported when they are called for.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swin_quant.base.errors import UsageError

PRECISIONS = ("int8", "float")


@dataclass(frozen=True)
class Exports:
    """What `export --for NAME` writes.

    `artifact` is the kind of its files, as run cards have it. `export` names a function `export(model, card, folder,
    options) -> Artifact`, `options` what makes its options from the words that it takes: `precision` (int8, float),
    and those of opset, float_type, batch, sm, fix_gelu_bias, labels and check that are in `flags`, or in `float_flags`
    with precision float. `fixed` are words that make the target. `policies`: the built-in ones that fit, best first;
    with `only`, no other can be run there. `float_type` is that of what is not int8, where there are several and none
    is asked for. `next_step`: commands to go on with; {file} is the artifact, {checkpoint} the calibrated file.
    `detail` is whatever the exporter itself wants to know of a target.
    """

    artifact: str
    export: str
    options: str
    policies: tuple[str, ...]
    flags: tuple[str, ...] = ()
    float_flags: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: bool = False
    float_type: str = "float32"
    next_step: tuple[str, ...] = ()
    detail: Any = None


@dataclass(frozen=True)
class Tolerances:
    """Limits of mean |Δlogit|: of a quantized artifact against fake-quant, of a float32 or half one against float32."""

    quantized: float
    float32: float
    half: float


@dataclass(frozen=True)
class Saturation:
    """An engine whose int8 products saturate on CPUs without VNNI (`saturation`).

    `limits`: environment variables that forbid it later instructions. `exact_products`: those of two activations do
    not saturate. `exact_kernels`: the setting of slower kernels that do not, for files that were made to bear it.
    """

    limits: tuple[str, ...] = ()
    exact_products: bool = False
    exact_kernels: str | None = None


@dataclass(frozen=True)
class Backend:
    """A target of `export`, an engine, or both.

    `runs`: the kinds of artifacts that its engine takes; `load` names a function `load(artifact, options) -> Engine`.
    `needs`: the package that the engine imports, and how to get it. `home`: the device that it runs on, whatever
    torch has; None: where the options say. `float_types` names a function that lists the types in which it can run
    what is not int8, where it chooses; `only_float_type` is that of an engine with one. `emulates`: what it computes is
    meant, not how fast; `fast_on` names the one device of several on which it does not. `only_quantized`: it runs no
    float export; `float_form` is the type of one where none is asked for. `float8`: it runs files of that. `labels`
    names a function from an artifact of the backend's own kind to the class names that it carries.

    `graph_per_shape`: its engine compiles a graph for each size of batch, and keeps `EngineOptions.graphs` of them.

    `beside`: the endings, in place of an artifact's own, of files that its engine takes where they lie there; * is
    any text.

    `inside` names a function `inside(artifact, options)` that makes one from images to what each module gives of them
    on the engine, by its name; `restore` one from an artifact of the backend's own kind to what undoes, module by
    module, that the export moved its tensors.
    """

    name: str
    exports: Exports | None = None
    runs: tuple[str, ...] = ()
    load: str | None = None
    needs: tuple[str, str] | None = None
    home: str | None = None
    tolerances: Tolerances | None = None
    float_types: str | None = None
    only_float_type: str | None = None
    emulates: bool = False
    fast_on: str | None = None
    only_quantized: bool = False
    float8: bool = False
    float_form: str = "float32"
    saturation: Saturation | None = None
    labels: str | None = None
    graph_per_shape: bool = False
    beside: tuple[str, ...] = ()
    inside: str | None = None
    restore: str | None = None

    @property
    def exporting(self) -> Exports:
        """What it exports. UsageError for one that only runs what others write."""
        if self.exports is None:
            raise UsageError(f"backend {self.name} exports nothing: choose another")
        return self.exports

    @property
    def loader(self) -> Callable[..., Any]:
        """The `load(artifact, options)` of its engine. UsageError for one without."""
        if self.load is None:
            raise UsageError(f"backend {self.name} has no engine: choose another")
        return function(self.load)

    @property
    def runs_its_export(self) -> bool:
        """Whether its engine takes the very file that `export` writes for it."""
        return self.exports is not None and self.exports.artifact in self.runs

    def is_fast_on(self, device: str) -> bool:
        """Whether its times mean anything on a device."""
        return not self.emulates and self.fast_on in (None, device)

    @property
    def is_installed(self) -> bool:
        """Whether the package that the engine needs can be found; it is not imported."""
        package = self.needs[0] if self.needs else None
        return package is None or package in sys.modules or importlib.util.find_spec(package) is not None

    @property
    def remedy(self) -> str:
        """How to get what the engine needs."""
        return self.needs[1] if self.needs else ""


def function(place: str) -> Callable[..., Any]:
    """What "module:function" names, imported now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
