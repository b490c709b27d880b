"""Predictions of many pictures: Parquet files of some thousand rows each, shared among ranks, gone on with if cut off.

A shard is written whole or not at all, and says in its metadata what it is of: one that is there already, of the same
model, pictures and options, is not computed again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, sha256_of_data, write_json
from swin_quant.base.progress import log
from swin_quant.data.pictures import Pictures, UnreadablePicture
from swin_quant.data.sampling import digest
from swin_quant.tasks.predict import Answering, Guess, Predictions, class_names, predict

SCHEMA = "swin-quant/prediction-shards/1"
ROWS = 10_000
_KEY = b"swin_quant.predictions"


@dataclass(frozen=True)
class Sharding:
    """Where shards go, and how many pictures each is of; `top` classes a picture, named by the file `labels`."""

    folder: Path
    rows: int = ROWS
    top: int = 5
    labels: str | None = None
    batch_size: int = 32
    workers: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UsageError(f"‹shard› {self.rows}: must be at least 1")


class PictureRange(Pictures):
    """The pictures `start` to `stop` of others."""

    def __init__(self, whole: Pictures, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.names, self.labels = whole.names[start:stop], whole.labels[start:stop]
        self.class_names = whole.class_names

    def open(self, index: int) -> Any:
        return self._whole.open(self._start + index)


def predict_shards(
    by: Answering, pictures: Pictures, how: Sharding, world: World = World()  # noqa: B008
) -> Path:  # fmt: skip
    """Write `predictions-00000-of-00012.parquet` ... and `predictions.json`, which names them; that file's path.

    Columns: picture, classes (the best first: index, name, probability), unreadable (why, else null). Rows have the
    order of the pictures. Every rank computes each world.size-th shard. UsageError for a folder with shards of others.
    """
    library("pyarrow", "data")
    ensure_writable_dir(how.folder)
    names = class_names(by.classes, how.labels, by.names)
    subject = {
        "model": by.name, "sha256": by.sha256, "engine": by.engine.name, "precision": by.engine.precision,
        "policy": by.engine.policy, "policy_sha256": by.engine.policy_sha256, "preprocess": by.preprocess.to_dict(),
        "top": how.top, "classes": digest(names), "pictures": len(pictures), "pictures_sha256": digest(pictures.names),
    }  # fmt: skip
    key = sha256_of_data(subject)
    count = -(-len(pictures) // how.rows)
    files = [how.folder / f"predictions-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
    mine = range(world.rank, count, world.size)
    left = [number for number in mine if not _is_done(files[number], key)]
    if len(left) < len(mine):
        log.info("%d of %d shards are there already", len(mine) - len(left), len(mine))
    for number in left:
        part = PictureRange(pictures, number * how.rows, min(len(pictures), (number + 1) * how.rows))
        rows = _rows(part, _predicted(by, part, how))
        atomic_write_bytes(files[number], _parquet(rows, key))
        log.info("%s: %d pictures", files[number].name, len(rows))
    unreadable = sum(gather([sum(_unreadable_in(files[number]) for number in mine)]))
    manifest = how.folder / "predictions.json"
    if world.is_main:
        write_json(manifest, {"schema": SCHEMA, **subject, "unreadable": unreadable, "files": [f.name for f in files]})
    return manifest


def _predicted(by: Answering, part: Pictures, how: Sharding) -> Predictions:
    try:
        return predict(by, part, how.top, how.labels, how.batch_size, how.workers)
    except SwinQuantError:
        reasons = [_why(part, index) for index in range(len(part))]
        if None in reasons:
            raise
        return Predictions({}, {name: str(why) for name, why in zip(part.names, reasons, strict=True)})


def _why(pictures: Pictures, index: int) -> str | None:
    """Why a picture cannot be read; None if it can."""
    try:
        pictures.read(index)
    except UnreadablePicture as error:
        return str(error)
    return None


def _rows(part: Pictures, found: Predictions) -> list[dict[str, Any]]:
    return [
        {
            "picture": name,
            "classes": [asdict(guess) for guess in _guesses(found, name)],
            "unreadable": found.unreadable.get(name),
        }
        for name in part.names
    ]


def _guesses(found: Predictions, name: str) -> Sequence[Guess]:
    return found.answers.get(name, [])


def _parquet(rows: Sequence[dict[str, Any]], key: str) -> bytes:
    pyarrow: Any = library("pyarrow", "data")
    from pyarrow import parquet

    guess = pyarrow.struct([("index", pyarrow.int32()), ("name", pyarrow.string()), ("probability", pyarrow.float32())])
    schema = pyarrow.schema(
        [("picture", pyarrow.string()), ("classes", pyarrow.list_(guess)), ("unreadable", pyarrow.string())],
        metadata={_KEY: key.encode()},
    )
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _is_done(file: Path, key: str) -> bool:
    """Whether a shard is there. UsageError if it is of another run."""
    from pyarrow import ArrowException, parquet

    if not file.exists():
        return False
    try:
        written = (parquet.read_schema(file).metadata or {}).get(_KEY, b"").decode()
    except (ArrowException, OSError, UnicodeDecodeError):
        written = ""
    if written != key:
        raise UsageError(f"{file}: is not of this model, these pictures and options: choose another ‹output›")
    return True


def _unreadable_in(file: Path) -> int:
    from pyarrow import parquet

    column = parquet.read_table(file, columns=["unreadable"]).column("unreadable")
    return len(column) - int(column.null_count)
