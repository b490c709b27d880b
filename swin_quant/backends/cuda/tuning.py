"""Tiles timed on a GPU, in a file beside the artifact that can be shipped with it: one file for each kind of GPU.

Times hold for the kernels, GPU and compiler that the file names; a file for others is ignored. A launch that was not
timed runs with the default tiles of `kernels.tiles`.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import escape
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from swin_quant.backends.cuda.fusions import with_fusions
from swin_quant.backends.cuda.kernels.tiles import MOST_WARPS, Tiles
from swin_quant.backends.cuda.program import Launch, ScalarRef, TensorRef, kernel_of, parts_of
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_json, write_json
from swin_quant.base.progress import log
from swin_quant.base.schema import checked, counted, within

SCHEMA = "swin-quant/tiles/1"
SUFFIX = ".tiles.json"
_MOST = 100_000
FARTHEST = 4  # tiles serve batches up to this many times larger or smaller


class TimedTiles(TypedDict):
    """One launch (`shape_of`) for a batch: its best tiles and their time. Both are None if it ran with no tiles; then
    its fusion is not chosen."""

    launch: str
    batch: Annotated[int, within(least=1)]
    tiles: Tiles | None
    us: Annotated[float | None, within(least=0)]


class TilesFile(TypedDict):
    """`kernels`: the hash of their sources; `gpu`: its name; `triton`: the compiler's version."""

    schema: Literal["swin-quant/tiles/1"]
    kernels: str
    gpu: str
    triton: str
    timed: Annotated[list[TimedTiles], counted(0, _MOST)]


@dataclass(frozen=True)
class TunedFor:
    """The kernels, GPU and compiler that times hold for."""

    kernels: str
    gpu: str
    triton: str


def here() -> TunedFor:
    """This process's first GPU, kernels and compiler. There must be a GPU."""
    import torch
    import triton

    return TunedFor(kernels_hash(), torch.cuda.get_device_name(), triton.__version__)


def kernels_hash() -> str:
    """SHA-256 of the sources of all kernels."""
    folder = Path(__file__).parent / "kernels"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def shape_of(launch: Launch) -> str:
    """All that a launch's time depends on except the batch, in one line."""
    words = [f"{word}={_shape(value)}" for word, value in launch.arguments.items()]
    return f"{launch.op} {' '.join(words)}"


def _shape(value: Any) -> str:
    if isinstance(value, TensorRef):
        sides = value.shape if value.packed else value.shape[1:]
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, sides))}]"
    if isinstance(value, ScalarRef | float):
        return "number"
    if inner := parts_of(value):
        return f"({','.join(f'{word}={_shape(part)}' for word, part in inner.items())})"
    return str(value)


@dataclass(frozen=True)
class TileTable:
    """The best tiles and their microseconds, by launch and batch; None and inf if no tiles ran."""

    known: Mapping[str, Mapping[int, tuple[Tiles | None, float]]]

    def tiles_for(self, launch: Launch, batch: int) -> Tiles | None:
        """The tiles of the nearest timed batch; None if none is near, or no tiles ran."""
        timed = self.known.get(shape_of(launch), {})
        nearest = _nearest(timed, batch)
        return timed[nearest][0] if nearest else None

    def times_of(self, launches: Iterable[Launch], batch: int) -> dict[str, float] | None:
        """Microseconds by `shape_of`, at the nearest batch at which all launches were timed; None if none is near.

        Times at two batches cannot be compared.
        """
        timed = {shape: self.known.get(shape, {}) for shape in map(shape_of, launches)}
        nearest = _nearest(set.intersection(*map(set, timed.values())), batch)
        return {shape: batches[nearest][1] for shape, batches in timed.items()} if nearest else None


def _nearest(timed: Iterable[int], batch: int) -> int | None:
    near = {max(batch, other) / min(batch, other): other for other in sorted(timed)}
    nearest = min(near, default=FARTHEST + 1)
    return near[nearest] if nearest <= FARTHEST else None


NO_TILES = TileTable({})


def write_tiles(path: Path, place: TunedFor, timed: Sequence[TimedTiles]) -> None:
    """Write the file whole, or not at all."""
    plain = [{**one, "tiles": asdict(one["tiles"]) if one["tiles"] else None} for one in timed]
    write_json(path, {"schema": SCHEMA, **asdict(place), "timed": plain})


def read_timed(path: Path, place: TunedFor, launches: Sequence[Launch] = ()) -> list[TimedTiles]:
    """The entries of a file. SwinQuantError if it is damaged, was made for another `place`, or has tiles that the
    kernels of these `launches`, single or fused, do not take."""
    data = read_json(path, "tiles file")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise SwinQuantError(
            f"{path}: is no tiles file of this version ({SCHEMA}): run `python tools/cuda/tune.py` again"
        )
    file: TilesFile = checked(TilesFile, data, str(path))
    if other := [f"{word} {file[word]:.40}" for word in ("gpu", "triton") if file[word] != getattr(place, word)]:
        raise SwinQuantError(
            f"{path}: was tuned on {', '.join(other)}, not on {place.gpu} with triton {place.triton}: run `python "
            "tools/cuda/tune.py` here"
        )
    if file["kernels"] != place.kernels:
        raise SwinQuantError(f"{path}: was tuned for other kernels than these: run `python tools/cuda/tune.py` again")
    run = {shape_of(launch): launch for launch in with_fusions(launches)}
    for number, one in enumerate(file["timed"]):
        if (one["tiles"] is None) != (one["us"] is None):
            raise SwinQuantError(
                f"{path}: timed[{number}]: has tiles or time alone: run `python tools/cuda/tune.py` again"
            )
        if one["tiles"] is None:
            continue
        if not one["tiles"].are_possible():
            raise SwinQuantError(
                f"{path}: timed[{number}].tiles: sides, warps and windows must be powers of two, warps at most "
                f"{MOST_WARPS}: run `python tools/cuda/tune.py` again"
            )
        if one["launch"] in run:
            _check(run[one["launch"]], one["tiles"], f"{path}: timed[{number}].tiles")
    return file["timed"]


def read_tiles(path: Path, place: TunedFor, launches: Sequence[Launch] = ()) -> TileTable:
    """The tiles of a file. Raises as `read_timed` does."""
    known: dict[str, dict[int, tuple[Tiles | None, float]]] = {}
    for one in read_timed(path, place, launches):
        known.setdefault(one["launch"], {})[one["batch"]] = one["tiles"], inf if one["us"] is None else one["us"]
    return TileTable(known)


def _check(launch: Launch, tiles: Tiles, where: str) -> None:
    """SwinQuantError, which names the place in the file, unless the launch's kernel takes these tiles."""
    try:
        kernel_of(launch).prepare(tiles)
    except SwinQuantError as error:
        raise SwinQuantError(f"{where}: {launch.op}: {error}: run `python tools/cuda/tune.py` again") from error


def tiles_beside(artifact: Path, place: TunedFor, launches: Sequence[Launch]) -> TileTable:
    """The tiles beside an artifact: from the first file that holds for this `place`, or none, with a warning, if all
    are for others. The file named for this GPU comes first, then the one named for none, then those of other GPUs."""
    named = [tiles_path(artifact, gpu) for gpu in (place.gpu, "")]
    others = sorted(artifact.parent.glob(f"{escape(artifact.stem)}.*{SUFFIX}"))
    refused = []
    for path in dict.fromkeys((*named, *others)):
        if path.is_file():
            try:
                return read_tiles(path, place, launches)
            except SwinQuantError as error:
                refused.append(error)
    if refused:
        log.warning("%s; the default tiles are used", refused[0])
    return NO_TILES


def timed_before(path: Path, place: TunedFor, launches: Sequence[Launch], is_told: bool = True) -> list[TimedTiles]:
    """The entries of a file that tuning can continue from; none, with a warning if `is_told`, if the file is for
    another place."""
    if not path.is_file():
        return []
    try:
        return read_timed(path, place, launches)
    except SwinQuantError as error:
        if is_told:
            log.warning("%s; it is replaced", error)
        return []


def tiles_path(artifact: Path, gpu: str) -> Path:
    """The path of an artifact's tiles for this GPU. With "" it names no GPU; the file itself does."""
    word = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return artifact.with_name(f"{artifact.stem}.{word}{SUFFIX}" if word else artifact.stem + SUFFIX)
