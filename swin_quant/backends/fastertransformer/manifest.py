"""The manifest: JSON beside the exported tensors, with the op's weight list, entry by entry, and its other arguments.

All of it follows from the geometry and the target, so a manifest is checked by making it again. An export is read back
by its manifest: every tensor is checked against the list, and every layout undone. FasterTransformer's torch classes
take the arguments by order, its TensorRT plugins by name (docs/reference, sections 3.1 and 4.2).
"""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.fastertransformer import KINDS
from swin_quant.backends.fastertransformer.limits import DEFAULT_SCALE, check_limits, is_default_scale
from swin_quant.backends.fastertransformer.slots import HEAD, Case, Slot, slots
from swin_quant.backends.fastertransformer.weights import from_stored
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import read_json
from swin_quant.base.reading import reads
from swin_quant.base.schema import checked, counted, within
from swin_quant.checkpoint import read_state_dict
from swin_quant.models.geometry import Geometry

SCHEMA = "swin-quant/fastertransformer/2"
_BOUNDS = {
    "depths": (1, 256),
    "num_heads": (1, 4096),
    "embed_dim": (1, 8192),
    "img_size": (1, 8192),
    "in_chans": (1, 1024),
    "int8_mode": (1, 2),
}


class GpuTarget(TypedDict):
    """The target of the list: the op's class, its kind of list, and the GPU's compute capability (80 for 8.0).

    `fix_gelu_bias`: fc1's biases of more than 4096 channels are stored where the INT8 GELU kernel reads them.
    """

    op: str
    kind: str
    sm: int
    classes: int
    fix_gelu_bias: bool


class Manifest(TypedDict):
    """`arguments` follow the weights in the op's constructor, in order; `head` is outside the op, in float32.

    `plugin`: its name, its scalar fields [name, type, value], and the element count of each weight field.
    """

    schema: str
    name: str
    file: str
    target: GpuTarget
    arguments: dict[str, Any]
    entries: list[dict[str, Any]]
    head: list[str]
    plugin: dict[str, Any]


def manifest_name(file: Path) -> str:
    """The name of the manifest beside an exported file."""
    return f"{file.stem}_manifest.json"


def _op_arguments(case: Case) -> dict[str, Any]:
    """The arguments of `Class(weights, ...)` after the weights, in order; lists become int32 tensors on the CPU."""
    g = case.g
    return {
        **({"int8_mode": case.int8_mode} if case.int8 else {}),
        "depths": list(g.depths),
        "num_heads": list(g.heads),
        "max_batch": case.max_batch,
        "img_size": g.image_size,
        "patch_size": g.patch_size,
        "in_chans": g.in_chans,
        "embed_dim": g.embed_dim,
        "window_size": g.window,
        "ape": g.ape,
        "patch_norm": g.patch_norm,
        "layer_num": len(g.depths),
        "mlp_ratio": float(g.mlp_ratio),
        "qkv_bias": g.qkv_bias,
        "qk_scale": DEFAULT_SCALE if is_default_scale(g) else float(g.qk_scale or 0),
        "version": case.version,
    }


def make_manifest(name: str, file: str, case: Case) -> Manifest:
    """The manifest of an export."""
    g = case.g
    op, arguments, entries = "SwinTransformerINT8" if case.int8 else "SwinTransformer", _op_arguments(case), []
    for slot in slots(case):
        said = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(slot).items()}
        del said["part"], said["place"]  # the name says both
        entries.append({"key": slot.key, "name": slot.name, "field": slot.field, **said})
    fields: list[list[Any]] = []
    for key, value in sorted(arguments.items(), key=lambda one: isinstance(one[1], list)):  # lists come last
        kind = "float32" if isinstance(value, float) else "int32"
        fields.append([key.replace("max_batch", "max_batch_size"), kind, int(value) if type(value) is bool else value])
    return Manifest(
        schema=SCHEMA,
        name=name,
        file=file,
        target=GpuTarget(op=op, kind=case.kind, sm=case.sm, classes=g.classes, fix_gelu_bias=case.fix_gelu_bias),
        arguments=arguments,
        entries=entries,
        head=list(HEAD),
        plugin={
            "name": f"Custom{op}Plugin",
            "version": "1",
            "namespace": "",
            "output": [-1, g.embed_dim * 2 ** (len(g.depths) - 1), 1, 1],
            "fields": fields,
            "weights": {entry["field"]: math.prod(entry["shape"]) for entry in entries},
        },
    )


def _read_manifest(path: Path) -> tuple[Manifest, Case]:
    """Read and check a manifest. SwinQuantError names what contradicts its own arguments."""
    manifest = read_json(path, "FasterTransformer manifest")
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise SwinQuantError(f"{path}: is not a FasterTransformer manifest of this version ({SCHEMA}); export again")
    checked(Manifest, manifest, str(path))
    case = _read_case(manifest, path)
    expected = make_manifest(manifest["name"], manifest["file"], case)
    for key, value in expected.items():
        if key != "entries" and manifest[key] != value:
            raise SwinQuantError(f"{path}: {key} contradicts the arguments of the op; export again")
    if len(manifest["entries"]) != len(expected["entries"]):
        count, wanted = len(manifest["entries"]), len(expected["entries"])
        raise SwinQuantError(f"{path}: lists {count} tensors, the op takes {wanted}; export again")
    for given, due in zip(manifest["entries"], expected["entries"], strict=True):
        if given != due:
            raise SwinQuantError(f"{path}: entry {due['key']} is not what the op takes there; export again")
    return manifest, case


def _read_case(manifest: Manifest, path: Path) -> Case:
    """The case that the arguments describe; every number is checked before anything is computed from it."""
    target, arguments = manifest["target"], manifest["arguments"]
    version, form = arguments.get("version", 0), (target["kind"], target["sm"], target["fix_gelu_bias"])
    blank = Geometry(32, 1, 1, 1, 32, (1,), (1,), 1, 4.0, True, None, 0.0, 0.0, False, True, (0,))
    like = _op_arguments(Case(blank, 1, target["kind"], 80, int8_mode=1))
    if target["kind"] not in KINDS or arguments.keys() != like.keys() or version not in (1, 2):
        raise SwinQuantError(f"{path}: its arguments are not those of {target['op']!r:.60}; export again")
    for name, value in arguments.items():
        least, most = _BOUNDS.get(name, (0, 65536))
        kind = int if name in ("depths", "num_heads") else type(like[name])
        wanted: Any = Annotated[kind, within(least=least, most=most)]
        if isinstance(like[name], list):
            wanted = Annotated[list[wanted], counted(1, 16)]
        checked(wanted, value, str(path), f"arguments.{name}")
    scale, depths = arguments["qk_scale"], tuple(arguments["depths"])
    same = ("patch_size", "in_chans", "embed_dim", "mlp_ratio", "qkv_bias", "ape", "patch_norm")
    g = replace(
        blank,
        image_size=arguments["img_size"],
        classes=target["classes"],  # only the head tells them
        depths=depths,
        heads=tuple(arguments["num_heads"]),
        window=arguments["window_size"],
        qk_scale=None if scale == DEFAULT_SCALE else scale,
        pretrained_windows=(0,) * len(depths),
        **{key: arguments[key] for key in same},
    )
    try:
        case = Case(g, version, *form, arguments.get("int8_mode"), arguments["max_batch"])
        check_limits(case)
        shapes_hold = len(g.depths) == len(g.heads) and all(
            g.resolution(i) % g.window_in_use(i) == 0 and (g.embed_dim * 2**i) % heads == 0
            for i, heads in enumerate(g.heads)
        )
    except UsageError as error:
        raise SwinQuantError(f"{path}: {error}") from error
    except (ArithmeticError, ValueError) as error:
        raise SwinQuantError(f"{path}: no Swin has these arguments ({error}); export again") from error
    if not shapes_hold:
        raise SwinQuantError(f"{path}: no Swin has these arguments; export again")
    return case


@dataclass(frozen=True)
class Stored:
    """An export as read: `tensors` by slot name, in their stored types, without layout; `head` in float32."""

    case: Case
    manifest: Manifest
    entries: list[Slot]
    tensors: dict[str, Tensor] = field(repr=False)
    head: tuple[Tensor, Tensor] = field(repr=False)


@reads("FasterTransformer export", lambda artifact: artifact.file)
def read_export(artifact: Artifact) -> Stored:
    """The content of an artifact of this backend. SwinQuantError names the entry that is missing or wrong."""
    if artifact.record["backend"] != "fastertransformer":
        raise SwinQuantError(f"{artifact.file}: is an export of backend {artifact.record['backend']!r:.40}")
    file = artifact.file
    manifest, case = _read_manifest(file.with_name(manifest_name(file)))
    if manifest["file"] != file.name:
        raise SwinQuantError(f"{file}: its manifest is that of {manifest['file']!r:.80}")
    entries = slots(case)
    state, _ = read_state_dict(file)
    if strange := sorted(state.keys() ^ {*(slot.key for slot in entries), *HEAD}):
        raise SwinQuantError(f"{file}: missing or unknown tensors: {listed(strange, 3)}; export again")
    for slot in entries:
        shape = (slot.source[0] * slot.source[1],) if slot.container else slot.shape
        _check(str(file), slot.key, state[slot.key], slot.dtype, shape)
    channels = case.g.embed_dim * 2 ** (len(case.g.depths) - 1)
    for name, shape in zip(HEAD, [(case.g.classes, channels), (case.g.classes,)], strict=True):
        _check(str(file), name, state[name], "float32", shape)
    try:
        tensors = {slot.name: from_stored(slot, state[slot.key], case.g) for slot in entries}
    except SwinQuantError as error:
        raise SwinQuantError(f"{file}: {error}") from error
    return Stored(case, manifest, entries, tensors, (state[HEAD[0]], state[HEAD[1]]))


def _check(file: str, key: str, tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if found != (wanted := f"{dtype} {list(shape)}"):
        raise SwinQuantError(f"{file}: {key} is {found}, must be {wanted}; export again")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise SwinQuantError(f"{file}: {key} holds NaN or Inf; export again")
