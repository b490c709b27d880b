"""The file of an export: packed tensors and scalars, and a header that describes the network.

Nothing in the file is trusted: the header must describe a Swin that the engine runs, and the tensors must be exactly
those that its launches name.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from safetensors import safe_open
from safetensors.torch import save

from swin_quant.backends.artifact import Artifact, refuse_card
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.network import Network, is_finite
from swin_quant.backends.cuda.spec import ARITHMETICS, NetworkSpec
from swin_quant.backends.cuda.spec_from_policy import check_geometry
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes
from swin_quant.base.reading import reads
from swin_quant.base.schema import checked, counted, one_of, within
from swin_quant.checkpoint import read_state_dict
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.geometry import Geometry
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
    arithmetic: Annotated[str, one_of(ARITHMETICS)]
    float_type: Annotated[str, one_of(tuple(HALF_TYPES))]
    quantized: list[str]
    format: Annotated[str, one_of(FORMATS)]
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


def write_network(network: Network, path: Path) -> None:
    """Write the file whole, or not at all."""
    spec = network.spec
    header = PackedHeader(
        schema=SCHEMA,
        version=spec.version,
        arithmetic=spec.arithmetic,
        float_type=spec.float_type,
        quantized=sorted(spec.quantized),
        format=spec.format,
        preprocess=network.preprocess.to_dict() if network.preprocess else None,
        exit_factors=spec.exit_factors,
        geometry=asdict(spec.geometry),
    )
    scalars = {name: torch.tensor(value, dtype=torch.float32) for name, value in network.scalars.items()}
    stored = {name: tensor.view(_stored_type(tensor.dtype)) for name, tensor in network.tensors.items()}
    atomic_write_bytes(path, save(stored | scalars, {"format": "pt", _KEY: json.dumps(header)}))


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
