"""A backend as data: its export, the artifacts that its engine runs, and the other facts that commands need.

A descriptor costs nothing to import: it names functions as "module:function", which are imported on first use.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library

if TYPE_CHECKING:
    from swin_quant.quant.policy import Policy

PRECISIONS = ("int8", "float")


@dataclass(frozen=True)
class Exports:
    """The files of `export --for NAME`.

    `artifact`: the kind of the files, as run cards name it.
    `export`: names a function `export(model, card, folder, options) -> Artifact`.
    `options`: names the class of its options. Its keywords are `precision` (int8, float) and the ones in `flags`, or in
    `float_flags` with precision float.
    `fixed`: keywords that are always given, because they define the target.
    `policies`: built-in policies that fit, best first; with `only`, the target runs no other.
    `activation_bits`: the bits of activations that its files hold; empty: any.
    `float_type`: the default type of layers that are not int8.
    `next_step`: commands to go on with; {file} is the artifact, {data} a folder of pictures.
    `file_name`: of an export in {precision} of the model {name}, whose outputs are of this {kind} ("": logits).
    `with_operators`: the best of `policies` where operators are compiled, and the name of a function that says whether
    they are, for the model of a configuration (a dict).
    `needs`: the packages that the exporter imports, and the extra that brings them.
    `classifiers`: the model types whose classifiers are the only networks that it has kernels for; empty: any network.
    `detail`: data for the exporter alone.
    """

    artifact: str
    export: str
    options: str
    policies: tuple[str, ...]
    flags: tuple[str, ...] = ()
    float_flags: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: bool = False
    activation_bits: tuple[int, ...] = (8,)
    float_type: str = "float32"
    next_step: tuple[str, ...] = ()
    file_name: str = ""
    with_operators: tuple[str, str] | None = None
    needs: tuple[tuple[str, ...], str] | None = None
    classifiers: tuple[str, ...] = ()
    detail: Any = None

    def check_packages(self) -> None:
        """UsageError, which says how to install it, where a package is missing that the exporter imports."""
        packages, extra = self.needs or ((), "")
        for package in packages:
            library(package, extra)

    def policies_for(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """`policies`, best first here, for the model of a configuration."""
        if self.with_operators is None or not function(self.with_operators[1])(config):
            return self.policies
        best = self.with_operators[0]
        return (best, *(name for name in self.policies if name != best))


@dataclass(frozen=True)
class Tolerances:
    """Limits of mean |Δlogit|: a quantized artifact against fake-quant, a float32 or half one against float32."""

    quantized: float
    float32: float
    half: float


@dataclass(frozen=True)
class Saturation:
    """An engine whose int8 products saturate on CPUs without VNNI (`saturation`).

    `limits`: environment variables that forbid the engine later instructions.
    `exact_products`: products of two activations do not saturate.
    `exact_kernels`: the setting for slower kernels that do not saturate; only files exported for it can be loaded so.
    `exact_operators`: names a function that says whether all int8 products of an artifact are exact here, in compiled
    operators or with weights of 7 bits.
    `all_compiled`: names a function that says whether all int8 products of the model of a configuration are in compiled
    operators by default.
    """

    limits: tuple[str, ...] = ()
    exact_products: bool = False
    exact_kernels: str | None = None
    exact_operators: str | None = None
    all_compiled: str | None = None


@dataclass(frozen=True)
class Backend:
    """A target of `export`, an engine, or both.

    `writes`, `runs_on`: the files of its export and what runs them, in words for the README.
    `runs`: the kinds of artifacts that its engine takes.
    `load`: names a function `load(artifact, options) -> Engine`.
    `needs`: the package that the engine imports, and how to install it.
    `home`: the only device that the engine runs on; None: the options choose.
    `float_types`: names a function that lists the types that the engine can run float layers in, if it can choose.
    `only_float_type`: the float type of an engine that has one.
    `emulates`: the engine shows results, not speed; `fast_on` names the one device on which its speed counts, too.
    `only_quantized`: the engine runs no float export; `float_form` is the default type of a float export.
    `float8`: the engine runs float8 files.
    `labels`: names a function from an artifact of this backend to the class names in it.
    `check_card`: names a function of an artifact of this backend, which refuses a run card that contradicts the file.
    `graph_per_shape`: the engine compiles a graph for each batch size, and keeps `EngineOptions.graphs` of them.
    `inside`: names a function `inside(artifact, options)`, which returns a function from images to the output of each
    module on the engine, by the module's name.
    `products`: names a function `products(file, batch)`: product of an OnnxFile -> the type that the engine runs it in,
    with default settings; `batch`: fixed on loading, None: as the file has it.
    `restore`: names a function from an artifact of this backend to module -> a function that puts the module's tensor
    back into the trained model's order and scale.
    """

    name: str
    exports: Exports | None = None
    writes: str = ""
    runs_on: str = ""
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
    check_card: str | None = None
    graph_per_shape: bool = False
    inside: str | None = None
    products: str | None = None
    restore: str | None = None

    @property
    def exporting(self) -> Exports:
        """Its export. UsageError for a backend that only runs files."""
        if self.exports is None:
            raise UsageError(f"backend {self.name} exports nothing: choose another")
        return self.exports

    @property
    def loader(self) -> Callable[..., Any]:
        """The `load(artifact, options)` of its engine. UsageError for a backend without an engine."""
        if self.load is None:
            raise UsageError(f"backend {self.name} has no engine: choose another")
        return function(self.load)

    @property
    def runs_its_export(self) -> bool:
        """Whether its engine runs the file that `export` writes for it, without a build."""
        return self.exports is not None and self.exports.artifact in self.runs

    def takes(self, policy: "Policy") -> bool:
        """Whether its files can hold the policy, by the bits and formats of its activations."""
        if policy.name in self.exporting.policies or self.exporting.only or policy.has_float8:
            return policy.name in self.exporting.policies or (policy.has_float8 and self.float8)
        bits = self.exporting.activation_bits
        return not bits or policy.activation_bits <= {*bits}

    def is_fast_on(self, device: str) -> bool:
        """Whether times measured on `device` say how fast the engine is."""
        return not self.emulates and self.fast_on in (None, device)

    @property
    def is_installed(self) -> bool:
        """Whether the package that the engine needs is installed; nothing is imported."""
        return not self.needs or self.needs[0] in sys.modules or importlib.util.find_spec(self.needs[0]) is not None

    @property
    def remedy(self) -> str:
        """How to install the package that the engine needs."""
        return self.needs[1] if self.needs else ""


def function(place: str) -> Callable[..., Any]:
    """The function that "module:function" names, imported now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


# The ONNX engines compute fake-quant's formulas. Two differences remain: sums in another order, which move a value
# between two levels by one step, and the rounding of half-precision layers. Measured on micro models with logits up to
# 6: quantized 0.002, where quantization itself costs 0.015; bfloat16 0.005.
ONNX_TOLERANCES = Tolerances(quantized=0.02, float32=0.001, half=0.05)


@dataclass(frozen=True)
class OnnxTarget:
    """The form of ONNX file that an engine wants.

    `float_type`: the default type of float layers; `takes_float16`: float16 is allowed.
    `constants`: store values that other engines compute on loading, such as the position bias of each pair of tokens.
    `symmetric`: the engine takes no zero points. `int4`: it was seen to run INT4 weights. `fp8`: it takes float8.
    `fuses_attention`: it fuses attention of rank 4 into one operator.
    `unsigned`: Q/DQ pairs that a convolution and other operators read are uint8.
    `reshaped`: users of the engine give a file other shapes, which must then fail.
    `channels_last`: it keeps channels last between convolutions, also in group norms of the form for that.
    `ends`: it takes uint8 pictures and files with more outputs than logits.
    `npu`: it may have the form for NPUs.
    `compiled`: plugins for its files by default, which are compiled at first use; `are_compiled`: names a function that
    says whether an architecture's files have an operator here; `tuned`: the groups of them that `export --tune` times.
    """

    name: str
    float_type: str = "float32"
    takes_float16: bool = False
    constants: bool = False
    symmetric: bool = False
    int4: bool = False
    fp8: bool = False
    unsigned: bool = False
    fuses_attention: bool = True
    reshaped: bool = False
    channels_last: bool = False
    ends: bool = True
    npu: bool = False
    compiled: tuple[str, ...] = ()
    are_compiled: str = ""
    tuned: tuple[tuple[str, ...], ...] = ()


def onnx_target(
    target: OnnxTarget,
    policies: tuple[str, ...],
    next_step: tuple[str, ...] = (),
    with_operators: tuple[str, str] | None = None,
) -> Exports:
    """The export of an engine that reads ONNX."""
    return Exports(
        artifact="onnx",
        export="swin_quant.backends.onnx.export:export",
        options="swin_quant.backends.onnx.options:OnnxOptions",
        policies=policies,
        flags=("opset", "float_type", "batch", "labels", "replace", "plugin")
        + ("int4_weights",) * target.int4
        + ("plain",) * bool(target.compiled)
        + ("npu",) * target.npu
        + ("uint8_input", "softmax", "top_k") * target.ends,
        fixed={"target": target.name},
        activation_bits=(8,) if target.symmetric else (8, 16),
        float_type=target.float_type,
        needs=(("onnx", "onnxscript"), "onnx"),
        detail=target,
        next_step=next_step,
        file_name="{name}{kind}_{precision}" + (f"_{target.name}" if target.name != "portable" else "") + ".onnx",
        with_operators=with_operators,
    )
