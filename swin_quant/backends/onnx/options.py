"""The options of the exporter. Options that do not fit together, or not the target, are refused here."""

from dataclasses import dataclass, field

from swin_quant.backends.backend import PRECISIONS, OnnxTarget
from swin_quant.backends.registry import targets
from swin_quant.base.errors import UsageError, offered
from swin_quant.operators.plugins import parse_plugins
from swin_quant.operators.replacements import chosen

FLOAT_TYPES = ("float32", "float16")
OPSETS = range(17, 21)
FP8_OPSET = 19  # the first with float8 in Q/DQ
INT4_OPSET = 21  # the first with INT4 in DequantizeLinear, and 16 bits in Q/DQ
INT4_BITS = 4
# The plugins whose nodes have linears, of int8 weights
BRANCHES = frozenset({"attention_branch", "map_branch", "token_branch", "mlp", "patch_merging"})
REWRITTEN = BRANCHES | {"attention", "patch_embedding"}  # the plugins whose nodes only an architecture's rewrites make


@dataclass(frozen=True)
class OnnxOptions:
    """Options of an ONNX export.

    `precision`: float leaves every node out.
    `opset`: 17 to 20; ONNX Runtime 1.31 does not load all Q/DQ of later opsets (docs/reference, section 3). None: the
    oldest that costs nothing (docs/results/releases.md): 17 in float32, 18 where 17 lacks an operator, 20 in float16
    and float8.
    `float_type`: the type of layers that are not int8, None: the target's default. `io_type`: of pictures and logits.
    `batch`: None for any batch.
    `labels`: the class names, for the file's metadata.
    `rewrites`: None for the rewrites of the architecture that suit the target.
    `int4_weights`: store weights of at most 4 bits as INT4, two in a byte; the opset is then 21.
    `wide`: the policy has activations of 16 bits, which `export` finds; the opset is then 21.
    `npu`: one picture at a time, no tensor above rank 5 and none of the operators that NPUs lack (`npu_rules`).
    `replace`: names of equivalent replacements. `plugin`: operators that become nodes of another domain
    (`roll=my.domain::Roll`). Both are for compilers that want the model's own operators, and leave the architecture's
    rewrites out, except for the plugins whose nodes the rewrites make.
    `plain`: without the operators that are compiled for the target (`compiled`).
    `uint8_input`: pictures are uint8 [batch, S, S, 3], as decoded, and the graph normalises them.
    `softmax`: give probabilities beside logits. `top_k`: give the best classes and their probabilities, too.
    """

    precision: str = "int8"
    target: str = "portable"
    opset: int | None = None
    float_type: str | None = None
    io_type: str = "float32"
    batch: int | None = None
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    rewrites: frozenset[str] | None = None
    int4_weights: bool = False
    wide: bool = field(default=False, repr=False)
    npu: bool = False
    replace: tuple[str, ...] = ()
    plugin: tuple[str, ...] = ()
    plain: bool = False
    uint8_input: bool = False
    softmax: bool = False
    top_k: int | None = None

    def __post_init__(self) -> None:
        for what, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("target", self.target, tuple(onnx_targets())),
            ("float type", self.float_type or FLOAT_TYPES[0], FLOAT_TYPES),
            ("type of input and output", self.io_type, FLOAT_TYPES),
        ):
            if value not in known:
                raise UsageError(f"no {what} {value!r}{offered(value, known)}")
        if self.int4_weights and (self.precision == "float" or not self.wants.int4):
            what = "precision float" if self.precision == "float" else f"target {self.target}"
            raise UsageError(f"‹int4_weights›: not with {what}: leave it out")
        newer = "‹int4_weights› needs" if self.int4_weights else "activations of 16 bits need" if self.wide else ""
        if newer and self.version != INT4_OPSET:
            raise UsageError(f"opset {self.opset}: {newer} {INT4_OPSET}: leave ‹opset› out")
        if not newer and self.version not in OPSETS:
            why = f"must be {OPSETS[0]} to {OPSETS[-1]}; ONNX Runtime fails on later Q/DQ"
            raise UsageError(f"opset {self.opset}: {why}")
        is_half = self.floats == "float16"
        if is_half and not self.wants.takes_float16:
            raise UsageError(
                f"target {self.target} is for CPUs, which cast float16 back and forth: give ‹float_type› float32"
            )
        if is_half and self.precision == "int8" and self.version < 19:
            raise UsageError(f"opset {self.opset}: float16 scales of Q/DQ need 19 or later; choose 19 or 20")
        if self.batch is not None and (type(self.batch) is not int or self.batch < 1):
            raise UsageError(f"‹batch› {self.batch}: must be a whole number from 1, or none for any batch")
        if self.npu:
            if self.batch not in (None, 1) or self.floats != "float32":
                how = "one picture at a time, in float32: leave ‹batch› and ‹float_type› out"
                raise UsageError(f"‹npu›: the file takes {how}")
            object.__setattr__(self, "batch", 1)
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise UsageError(f"‹top_k› {self.top_k}: must be a whole number from 1")
        if self.has_ends and not self.wants.ends:
            raise UsageError(f"‹uint8_input›, ‹softmax› and ‹top_k›: not with target {self.target}: leave them out")

        chosen(self.replace)
        plugged = parse_plugins(self.plugin, self.replace)
        rewritten = next((operator for operator in plugged if operator in REWRITTEN), None)
        if rewritten and (self.replace or not plugged.keys() <= REWRITTEN):
            why = "its graph has no operators for ‹replace› or other plugins: leave those out"
            raise UsageError(f"‹plugin› {rewritten}: {why}")
        if rewritten and is_half:
            raise UsageError(f"‹plugin› {rewritten}: not in float16: choose ‹float_type› float32")
        if self.int4_weights and (branch := next((operator for operator in plugged if operator in BRANCHES), None)):
            raise UsageError(f"‹plugin› {branch}: takes int8 weights: leave ‹int4_weights› out")
        if not rewritten and (self.replace or plugged):
            object.__setattr__(self, "rewrites", self.rewrites or frozenset())

    @property
    def compiled(self) -> tuple[str, ...]:
        """Plugins that are compiled for the target and take what they can; none where others are asked for."""
        asked = self.plain or self.plugin or self.replace or self.rewrites is not None
        if asked or self.precision == "float":
            return ()
        left_out = BRANCHES if self.int4_weights else ()
        return tuple(plugin for plugin in self.wants.compiled if plugin.partition("=")[0] not in left_out)

    @property
    def version(self) -> int:
        """The opset of the file."""
        if self.opset or self.int4_weights or self.wide:
            return self.opset or INT4_OPSET
        return OPSETS[-1] if self.floats == "float16" else OPSETS[0]

    @property
    def wants(self) -> OnnxTarget:
        """The form of file that the target wants."""
        return onnx_targets()[self.target]

    @property
    def floats(self) -> str:
        """The type of layers that are not int8."""
        return self.float_type or self.wants.float_type

    @property
    def has_ends(self) -> bool:
        """Whether the graph has another input or more outputs than the model: see `network`."""
        return self.uint8_input or self.softmax or bool(self.top_k)

    def suffix(self, quantized: str) -> str:
        """The part of a file's name for its precision and target; `quantized`: the bits of a quantized one."""
        kind = quantized if self.precision == "int8" else {"float32": "fp32", "float16": "fp16"}[self.floats]
        words = [kind] + [self.target] * (self.target != "portable") + ["uint8"] * self.uint8_input + ["npu"] * self.npu
        return "_".join(words)


def onnx_targets() -> dict[str, OnnxTarget]:
    """The targets of the backends that read ONNX, by name."""
    details = [backend.exports.detail for backend in targets().values() if backend.exports]
    return {detail.name: detail for detail in details if isinstance(detail, OnnxTarget)}
