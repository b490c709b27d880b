"""Export to the CUDA engine: one file packed for its kernels, and the run card beside it.

The file holds packed tensors and scalars, and a header that describes the network. Nothing in it is trusted when it is
read: the header must describe a Swin that the engine runs, and the tensors must be exactly those that its launches
name.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from swin_quant.backends.artifact import Artifact, finish_artifact, refuse_card
from swin_quant.backends.cuda.launches import build_program, check_batch
from swin_quant.backends.cuda.network import Network, is_finite, pack
from swin_quant.backends.cuda.spec import (
    ARITHMETICS,
    REDUCTION,
    NetworkSpec,
    check_geometry,
    list_operand_nodes,
    list_value_nodes,
    spec_for,
)
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.base.schema import allow, checked, counted, within
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint import read_state_dict
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import Swin
from swin_quant.quant.fake_quant import FORMATS
from swin_quant.score.engine import HALF_TYPES

SCHEMA = "swin-quant/cuda/3"
_KEY = "swin_quant"
_MOST_STAGES, _MOST_BLOCKS, _LARGEST = 16, 256, 65536
_Size = Annotated[int, within(least=1, most=_LARGEST)]
_Blocks = Annotated[list[Annotated[int, within(least=1, most=_MOST_BLOCKS)]], counted(1, _MOST_STAGES)]


class PackedHeader(TypedDict):
    """The network of the tensors. `preprocess`: how pixels are normalised; None if pictures arrive normalised."""

    schema: str
    version: Annotated[int, within(least=1, most=2)]
    arithmetic: Annotated[str, allow(ARITHMETICS)]
    float_type: Annotated[str, allow(tuple(HALF_TYPES))]
    quantized: list[str]
    format: Annotated[str, allow(FORMATS)]
    preprocess: dict[str, Any] | None
    exit_factors: NotRequired[bool]  # older files lack it
    geometry: dict[str, Any]


class _Sizes(TypedDict):
    """The sizes of a geometry, checked before anything is computed from them."""

    image_size: _Size
    patch_size: _Size
    in_chans: _Size
    classes: _Size
    embed_dim: _Size
    depths: _Blocks
    heads: Annotated[list[_Size], counted(1, _MOST_STAGES)]
    window: _Size
    mlp_ratio: Annotated[float, within(above=0, most=64)]


@reads("file of the CUDA engine")
def read_network(path: Path) -> Network:
    """The network in a file. SwinQuantError names what is missing, wrong or unknown."""
    state, _ = read_state_dict(path)
    header = _header(path)
    spec, preprocess = _spec(path, header), _preprocess(path, header)
    program = build_program(spec, 1)
    expected = {name: (packed.dtype, packed.shape) for name, packed in program.packed.items()}
    expected |= {name: (torch.float32, ()) for name in program.scalars}
    if strange := sorted(state.keys() ^ expected.keys()):
        raise SwinQuantError(f"{path}: missing or unknown tensors: {listed(strange, 3)}; export again")
    for name, (dtype, shape) in expected.items():
        found, stored = state[name], _stored_type(dtype)
        if found.dtype is not stored or tuple(found.shape) != shape:
            given, wanted = (str(kind).removeprefix("torch.") for kind in (found.dtype, stored))
            raise SwinQuantError(
                f"{path}: {name} is {given} {list(found.shape)}, must be {wanted} {list(shape)}; export again"
            )
        state[name] = found.view(dtype)
        if not is_finite(state[name]):
            raise SwinQuantError(f"{path}: {name} holds NaN or Inf; export again")
    scalars = {name: state[name].item() for name in program.scalars}
    return Network(spec, {name: state[name] for name in program.packed}, scalars, preprocess)


def _header(path: Path) -> PackedHeader:
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(_KEY)
    try:
        header = json.loads(text or "")
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise SwinQuantError(f"{path}: is not a file of the CUDA engine of this version ({SCHEMA}); export again")
    return checked(PackedHeader, header, str(path))


def _preprocess(path: Path, header: PackedHeader) -> Preprocess | None:
    if header["preprocess"] is None:
        return None
    try:
        preprocess = Preprocess.from_dict(header["preprocess"])
    except SwinQuantError as error:
        raise SwinQuantError(f"{path}: {error}") from error
    if preprocess.size != header["geometry"]["image_size"] or header["geometry"]["in_chans"] != len(preprocess.mean):
        raise SwinQuantError(f"{path}: preprocess is of other pictures than geometry; export again")
    return preprocess


def _spec(path: Path, header: PackedHeader) -> NetworkSpec:
    sizes = {key: header["geometry"].get(key) for key in _Sizes.__annotations__}
    checked(_Sizes, sizes, str(path), "geometry")
    g: Geometry = checked(Geometry, header["geometry"], str(path), "geometry")
    spec = NetworkSpec(
        g,
        header["version"],
        header["arithmetic"],
        frozenset(header["quantized"]),
        header["float_type"],
        header["format"],
        pixels=header["preprocess"] is not None,
        exit_factors=header.get("exit_factors", False),
    )
    stages = range(len(g.depths))
    if not (
        len(g.heads) == len(g.depths)
        and g.image_size % (g.patch_size * 2 ** (len(g.depths) - 1)) == 0
        and all(g.resolution(i) % g.window_in_use(i) == 0 for i in stages)
        and all(g.embed_dim * 2**i % g.heads[i] == 0 for i in stages)
    ):
        raise SwinQuantError(f"{path}: geometry: no Swin has these sizes; export again")
    try:
        check_geometry(spec)
    except UsageError as error:
        raise SwinQuantError(f"{path}: {error}") from error
    products, values = set(spec.products()), {name for name in spec.quantized if name.endswith("a v")}
    lone = {name for name in values if name.removesuffix("a v") + "q k" not in spec.quantized}
    if strange := sorted((spec.quantized - products) | lone):
        raise SwinQuantError(
            f"{path}: quantized names products that this Swin has not: {listed(strange, 2)}; export again"
        )
    if spec.is_ft and (
        spec.quantized != products
        or (spec.format, spec.pixels) != ("int8", False)
        or (spec.version, spec.arithmetic) == (2, "ft-mode2")
    ):
        raise SwinQuantError(f"{path}: {spec.arithmetic} has no such products; export again")
    return spec


def _stored_type(dtype: torch.dtype) -> torch.dtype:
    """The type in the file: float8 is stored as bytes, which every reader of checkpoints knows."""
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype


def check_card(artifact: Artifact) -> None:
    """SwinQuantError where the card prepares pictures otherwise than the file, which takes pixels."""
    inside = _preprocess(artifact.file, _header(artifact.file))
    if inside is not None and inside != artifact.preprocess:
        refuse_card(artifact, "preprocess", inside.to_dict())


BACKEND = "cuda"
LARGEST_BATCH = 256
MOST_PICTURES = 4096
_STREAMS = ("layernorm_input1", "layernorm_input2", "add1_residual", "add1_local", "add2_residual", "add2_local")


@dataclass(frozen=True)
class CudaOptions:
    """`precision`: int8 (the policy's format, which may be float8) or float. `float_type`: float16 or bfloat16, for the
    residual stream and, with precision float, all products; None: float16, and bfloat16 where calibration saw values
    beyond float16. `batch`: the most pictures a call takes. `uint8_input`: pictures are decoded pixels, uint8
    [batch, S, S, 3], which the patch embedding normalises."""

    precision: str = "int8"
    float_type: str | None = None
    batch: int = LARGEST_BATCH
    uint8_input: bool = False

    def __post_init__(self) -> None:
        if self.float_type not in (None, *HALF_TYPES):
            raise UsageError(f"‹float_type› {self.float_type}: the CUDA engine has {' and '.join(HALF_TYPES)}")
        if not 1 <= self.batch <= MOST_PICTURES:
            raise UsageError(f"‹batch› {self.batch}: must be at least 1, at most {MOST_PICTURES}")


def export(
    model: nn.Module,
    card: RunCard,
    folder: Path,
    options: CudaOptions = CudaOptions(),
) -> Artifact:
    """Write a calibrated `model`, with its policy applied, into `folder`.

    UsageError for a policy or geometry that the engine does not run; SwinQuantError for missing ranges, and for values
    that overflow float16.
    """
    spec = spec_for(model, options.precision, options.float_type or "float16", options.uint8_input)
    check_batch(spec, options.batch)
    assert isinstance(model, Swin)
    preprocess = Preprocess.from_dict(card.preprocess) if spec.pixels else None
    if preprocess and (not preprocess.is_square or model.in_chans != len(preprocess.mean)):
        raise UsageError("‹uint8_input›: is for RGB pictures of one size, which this model does not take")
    if spec.float_type == "float16":
        spec = replace(spec, float_type=_choose_float_type(spec, card, options.float_type))
    options = replace(options, float_type=spec.float_type)
    network = pack(model, spec, preprocess)
    precision = spec.format if options.precision == "int8" else spec.float_type
    words = [card.name, precision, *(["uint8"] if spec.pixels else []), BACKEND]
    file = ensure_writable_dir(folder) / f"{'_'.join(words)}.safetensors"
    card_path(file).unlink(missing_ok=True)  # without a card, an unfinished file is not taken for an export
    header = PackedHeader(
        schema=SCHEMA,
        version=spec.version,
        arithmetic=spec.arithmetic,
        float_type=spec.float_type,
        quantized=sorted(spec.quantized),
        format=spec.format,
        preprocess=preprocess.to_dict() if preprocess else None,
        exit_factors=spec.exit_factors,
        geometry=asdict(spec.geometry),
    )
    scalars = {name: torch.tensor(value, dtype=torch.float32) for name, value in network.scalars.items()}
    stored = {name: tensor.view(_stored_type(tensor.dtype)) for name, tensor in network.tensors.items()}
    atomic_write_bytes(file, save(stored | scalars, {"format": "pt", _KEY: json.dumps(header)}))
    made = asdict(options) | {"arithmetic": spec.arithmetic, "gelu": spec.gelu()}
    card = card if options.precision == "int8" else replace(card, policy=None)
    return finish_artifact(file, card, BACKEND, precision, made)


def _choose_float_type(spec: NetworkSpec, card: RunCard, given: str | None) -> str:
    """float16, or bfloat16, with a warning, where calibration saw values beyond float16 that the engine keeps in it:
    SwinQuantError if the policy or the `given` type forbids that."""
    halves = {
        node
        for product in spec.products()
        if product not in spec.quantized  # int8 saturates instead of overflowing
        for node in list_operand_nodes(product, spec.version)
    }
    if not spec.is_ft:
        halves |= {f"{layer}._aftergemm_quantizer" for layer in spec.linears() if layer.endswith(REDUCTION)}
    halves -= list_value_nodes(spec.quantized)
    seen = card.calibration["beyond_half"] if card.calibration else []
    beyond = [node for node in seen if node in halves or node.rpartition(".")[2].startswith(_STREAMS)]
    if not beyond:
        return "float16"
    said = f"calibration saw values beyond float16 (65504) in {listed(beyond, 4)}"
    if spec.is_ft:
        raise SwinQuantError(f"{said}, and {spec.arithmetic} is FasterTransformer's, in float16: give ‹policy› cuda")
    if given:
        raise SwinQuantError(f"{said}, which the CUDA engine keeps in it: give ‹float_type› bfloat16, or none")
    log.warning("%s: the residual stream is bfloat16", said)
    return "bfloat16"
