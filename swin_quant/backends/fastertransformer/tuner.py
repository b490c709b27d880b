"""FasterTransformer's GEMM tuner: the GEMM shapes of an INT8 Swin, and the file of tuned algorithms.

`swin_gemm` writes igemm_config.in, and the op reads it from the current directory (docs/reference, section 6). A
missing or misread file costs speed silently, so it is read strictly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from swin_quant.backends.fastertransformer.slots import hidden_channels
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import atomic_write_bytes, read_bounded
from swin_quant.base.reading import reads
from swin_quant.models.geometry import Geometry

INT8_TYPE = 3
HEADER = (
    "batch_size seq_len head_num size_per_head dataType ### batchCount m n k algoId customOption tile splitK_val "
    "swizzle reductionScheme workspaceSize stages exec_time"
)
MAX_BYTES = 16 * 1024 * 1024
Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class TunedGemm:
    """A product of [m, k] and [k, n] in a stage. The op looks it up by `key`: batch count, m, n, k."""

    stage: int
    layer: str
    m: int
    n: int
    k: int

    @property
    def key(self) -> Key:
        return 1, self.m, self.n, self.k


def gemm_shapes(g: Geometry, batch: int) -> list[TunedGemm]:
    """The int8 GEMMs of `batch` pictures: 4 a stage and one between stages, 19 in a model of four stages.

    m is the number of tokens, as in the op. All blocks of a stage have the same shapes; attention's own products are
    not tuned.
    """
    if batch < 1:
        raise UsageError(f"‹batch› {batch}: must be at least 1")
    shapes = []
    for stage in range(len(g.depths)):
        c, m = g.embed_dim * 2**stage, batch * g.resolution(stage) ** 2
        hidden = hidden_channels(g, stage)
        layers = {"qkv": (3 * c, c), "proj": (c, c), "fc1": (hidden, c), "fc2": (c, hidden)}
        shapes += [TunedGemm(stage, layer, m, n, k) for layer, (n, k) in layers.items()]
        if stage < len(g.depths) - 1:
            shapes.append(TunedGemm(stage, "patch merging", m // 4, 2 * c, 4 * c))
    return shapes


@dataclass(frozen=True)
class Tuned:
    """A line of igemm_config.in after its `###`; `exec_time` in ms."""

    batch_count: int
    m: int
    n: int
    k: int
    algo_id: int
    custom_option: int
    tile: int
    split_k: int
    swizzle: int
    reduction_scheme: int
    workspace: int
    stages: int
    exec_time: float

    @property
    def key(self) -> Key:
        return self.batch_count, self.m, self.n, self.k


@reads("tuner file")
def read_tuned(path: str | Path) -> dict[Key, Tuned]:
    """The entries of a tuner file; of several with one shape the first, as in the op. SwinQuantError names the line."""
    path = Path(path)
    lines = read_bounded(path, "tuner file", MAX_BYTES).decode(errors="replace").splitlines()
    if not lines or lines[0].split() != HEADER.split():
        raise SwinQuantError(f"{path}: is not an igemm_config.in: its first line must name the columns of INT8 GEMMs")
    found: dict[Key, Tuned] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        where, (before, mark, after) = f"{path}: line {number}", line.partition("###")
        columns, wanted = after.split(), len(fields(Tuned))
        if not mark or len(before.split()) != 5:
            raise SwinQuantError(f"{where}: must have 5 columns, then ###")
        if len(columns) != wanted:
            more = ": more are written for cuBLAS 11.11, whose op misreads this file" if len(columns) > wanted else ""
            raise SwinQuantError(f"{where}: has {len(columns)} columns after ###, not {wanted}{more}; tune again")
        try:
            values: list[Any] = [*map(int, columns[:-1]), float(columns[-1])]
            kind, entry = int(before.split()[4]), Tuned(*values)
        except ValueError as error:
            raise SwinQuantError(f"{where}: holds what is not a number; tune again") from error
        if kind != INT8_TYPE or min(entry.key) < 1 or not 0 <= entry.exec_time < float("inf"):
            raise SwinQuantError(f"{where}: is no INT8 GEMM (type {kind}, shape {entry.key}, {entry.exec_time} ms)")
        found.setdefault(entry.key, entry)
    return found


def write_tuned(path: str | Path, entries: Iterable[Tuned]) -> None:
    """Write a tuner file atomically, in the format of `swin_gemm`: the first four columns are 0."""
    lines = [HEADER]
    for entry in entries:
        *integers, time = astuple(entry)
        lines.append(" ".join(["0 0 0 0", str(INT8_TYPE), "###", *map(str, integers), f"{time:f}"]))
    atomic_write_bytes(path, ("\n".join(lines) + "\n").encode())


def fastest(tables: Sequence[dict[Key, Tuned]]) -> dict[Key, Tuned]:
    """The fastest entry of each shape in several files."""
    best: dict[Key, Tuned] = {}
    for table in tables:
        for key, entry in table.items():
            if key not in best or entry.exec_time < best[key].exec_time:
                best[key] = entry
    return best
