"""Predictions of many pictures: Parquet files of some thousand rows each, shared among ranks, resumed if cut off."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import sha256_of_data, write_json
from swin_quant.base.schema import within
from swin_quant.base.shards import Sharding, Shards
from swin_quant.data.pictures import Pictures
from swin_quant.data.sampling import digest
from swin_quant.tasks.predict import Answering, Predictions, class_names, predict

SCHEMA = "swin-quant/prediction-shards/1"


@dataclass(frozen=True)
class Answers:
    """What is asked of each picture: `top` classes, named by the file `labels`; and how pictures are read."""

    top: int = 5
    labels: str | None = None
    batch_size: int = 32
    workers: int = 0


class _Unread(TypedDict):
    """Of a shard: how many of its pictures could not be read."""

    unreadable: Annotated[int, within(least=0)]


class PictureRange(Pictures):
    """The pictures `start` to `stop` of others."""

    def __init__(self, whole: Pictures, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.names, self.labels = whole.names[start:stop], whole.labels[start:stop]
        self.class_names = whole.class_names

    def open(self, index: int) -> Any:
        return self._whole.open(self._start + index)


def predict_shards(
    by: Answering, pictures: Pictures, sharding: Sharding, asked: Answers, world: World = World()  # noqa: B008
) -> Path:  # fmt: skip
    """Write `predictions-00000-of-00012.parquet` ... and `predictions.json`, which names them; that file's path.

    Columns: picture, classes (the best first: index, name, probability), unreadable (why, else null). Rows have the
    order of the pictures. Every rank computes each world.size-th shard. UsageError for a folder with shards of others.
    """
    names = class_names(by.classes, asked.labels, by.names)
    subject = {
        "model": by.name, "sha256": by.sha256, "engine": by.engine.name, "precision": by.engine.precision,
        "policy": by.engine.policy, "policy_sha256": by.engine.policy_sha256, "preprocess": by.preprocess.to_dict(),
        "top": asked.top, "classes": digest(names), "pictures": len(pictures),
        "pictures_sha256": digest(pictures.names),
    }  # fmt: skip
    if extensions := by.engine.details.get("extensions"):  # which compute some operators in their own way
        subject["extensions"] = extensions
    shards = Shards(sharding, "predictions", len(pictures), sha256_of_data(subject))
    for number in shards.left(world):
        places = shards.places(number)
        part = PictureRange(pictures, places.start, places.stop)
        found = _predicted(by, part, asked)
        shards.write(number, _rows(part, found), _columns(), {"unreadable": len(found.unreadable)})
    unreadable = sum(gather([shards.facts(number, _Unread)["unreadable"] for number in shards.share(world)]))
    manifest = sharding.folder / "predictions.json"
    if world.is_main:
        files = [file.name for file in shards.files]
        write_json(manifest, {"schema": SCHEMA, **subject, "unreadable": unreadable, "files": files})
    return manifest


def _predicted(by: Answering, part: Pictures, asked: Answers) -> Predictions:
    try:
        return predict(by, part, asked.top, asked.labels, asked.batch_size, asked.workers)
    except SwinQuantError:
        reasons = [part.flaw(index) for index in range(len(part))]
        if None in reasons:
            raise
        return Predictions({}, {name: str(why) for name, why in zip(part.names, reasons, strict=True)})


def _rows(part: Pictures, found: Predictions) -> list[dict[str, Any]]:
    return [
        {
            "picture": name,
            "classes": [asdict(guess) for guess in found.answers.get(name, [])],
            "unreadable": found.unreadable.get(name),
        }
        for name in part.names
    ]


def _columns() -> list[tuple[str, Any]]:
    import pyarrow

    guess = pyarrow.struct([("index", pyarrow.int32()), ("name", pyarrow.string()), ("probability", pyarrow.float32())])
    return [("picture", pyarrow.string()), ("classes", pyarrow.list_(guess)), ("unreadable", pyarrow.string())]
