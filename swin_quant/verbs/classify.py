"""Answers of a model or an artifact to pictures: the most probable classes, in memory or in Parquet files; or logits.

Parquet files hold some thousand rows each, are shared among ranks, and a run that was cut off goes on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
import torch

from swin_quant.backends.artifact import Artifact
from swin_quant.base.arrays import write_arrays
from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import compute_data_sha256, ensure_writable_dir, write_json
from swin_quant.base.progress import log
from swin_quant.base.schema import within
from swin_quant.base.shards import Sharding, Shards
from swin_quant.config.outputs import FEATURES, LOGITS, count_classes
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.exported import choose_engine, load_engines, read_config
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import infer
from swin_quant.score.scoring import Guess, top_classes

SHARDS_SCHEMA = "swin-quant/prediction-shards/1"


@dataclass(frozen=True)
class Classifying:
    """An engine that classifies, its card's preprocessing, and names of the classes; `sha256`: its file's, if any."""

    name: str
    engine: Engine
    preprocess: Preprocess
    classes: int
    names: Sequence[str] = ()
    sha256: str | None = None
    device: torch.device = torch.device("cpu")


def classify(
    by: Classifying, pictures: Pictures, how: PictureSet, top: int
) -> tuple[dict[str, list[Guess]], dict[str, str]]:
    """The `top` most probable classes of each readable picture, best first, and for each unreadable one the reason.

    `how`: the batch, workers and the share that may be unreadable.
    """
    sizes = {"batch_size": how.batch or 32, "workers": how.workers or 0}
    engines = {by.engine.label: by.engine}
    inferred = infer(
        engines,
        pictures,
        by.preprocess,
        by.classes,
        **sizes,
        max_unreadable=how.max_unreadable or 0.0,
        device=by.device,
    )
    (logits,) = inferred.logits.values()
    answers = dict(zip(inferred.names, top_classes(logits, by.names, top), strict=True))
    index = {name: number for number, name in enumerate(pictures.names)} if inferred.unreadable else {}
    return answers, {name: pictures.flaw(index[name]) or f"{name}: cannot be read" for name in inferred.unreadable}


class _Unread(TypedDict):
    """The number of pictures of a shard that could not be read."""

    unreadable: Annotated[int, within(least=0)]


def classify_shards(
    by: Classifying, pictures: Pictures, how: PictureSet, top: int, sharding: Sharding, world: World
) -> Path:
    """Write `predictions-00000-of-00012.parquet` ... and `predictions.json`, which names them; that file's path.

    Columns: picture, classes (the best first: index, name, probability), unreadable (why, else null). Rows have the
    order of the pictures. Every rank computes each world.size-th shard. UsageError for a folder with shards of another
    run.
    """
    subject = {
        "model": by.name,
        "sha256": by.sha256,
        "engine": by.engine.name,
        "precision": by.engine.precision,
        "policy": by.engine.policy,
        "policy_sha256": by.engine.policy_sha256,
        "preprocess": by.preprocess.to_dict(),
        "top": top,
        "classes": digest(by.names),
        "pictures": len(pictures),
        "pictures_sha256": digest(pictures.names),
    }
    if extensions := by.engine.details.get("extensions"):  # libraries that compute some operators in their own way
        subject["extensions"] = extensions
    shards = Shards(sharding, "predictions", len(pictures), compute_data_sha256(subject))
    import pyarrow

    guess = pyarrow.struct([("index", pyarrow.int32()), ("name", pyarrow.string()), ("probability", pyarrow.float32())])
    columns = [("picture", pyarrow.string()), ("classes", pyarrow.list_(guess)), ("unreadable", pyarrow.string())]
    for number in shards.left(world):
        part = SomePictures(pictures, shards.places(number))
        try:
            answers, unreadable = classify(by, part, how, top)
        except SwinQuantError:
            reasons = [part.flaw(index) for index in range(len(part))]
            if None in reasons:
                raise
            answers, unreadable = {}, {name: str(why) for name, why in zip(part.names, reasons, strict=True)}
        rows = [
            {
                "picture": name,
                "classes": [asdict(guess) for guess in answers.get(name, [])],
                "unreadable": unreadable.get(name),
            }
            for name in part.names
        ]
        shards.write(number, rows, columns, {"unreadable": len(unreadable)})
    lost = sum(gather([shards.facts(number, _Unread)["unreadable"] for number in shards.share(world)]))
    manifest = sharding.folder / "predictions.json"
    if world.is_main:
        files = [file.name for file in shards.files]
        write_json(manifest, {"schema": SHARDS_SCHEMA, **subject, "unreadable": lost, "files": files})
    return manifest


def write_logits(
    artifact: Artifact,
    pictures: Pictures,
    how: PictureSet,
    engine: str | None,
    options: EngineOptions,
    folder: str | Path,
) -> Path:
    """Write <ARTIFACT>_logits.npz into `folder`: names [N], logits float32 [N, classes], top1 and labels int64 [N].

    An embedding is `embedding`, float32 [N, channels], in <ARTIFACT>_embedding.npz. Maps are `features0` to `features3`
    by stage, [N, C, h, w], in <ARTIFACT>_features.npz; where pictures have several sizes, those of picture 7 are
    `features0_7`, [C, h, w]. Pictures that cannot be read are left out. `how`: the batch, workers and the share that
    may be unreadable. Returns the file.
    """
    name = choose_engine(artifact, engine)
    cfg = read_config(artifact)
    kind = cfg.MODEL.OUTPUT_KIND
    target = ensure_writable_dir(folder) / f"{artifact.file.stem}_{kind}.npz"
    inferred = infer(
        load_engines(artifact, [name], options),
        pictures,
        artifact.preprocess,
        count_classes(cfg),
        batch_size=how.batch or 32,
        workers=how.workers or 0,
        max_unreadable=how.max_unreadable or 0.0,
    )
    if inferred.unreadable:
        log.warning("left out, unreadable: %s", listed(inferred.unreadable))
    arrays: dict[str, np.ndarray] = {"names": np.array(inferred.names), "labels": inferred.labels.numpy()}
    if kind == FEATURES:
        (outputs,) = inferred.outputs.values()
        for place, parts in enumerate(zip(*outputs, strict=True)):
            maps = [map_.numpy() for part in parts for map_ in part]
            called = f"{FEATURES}{(cfg.MODEL.FEATURES.STAGES or range(len(outputs[0])))[place]}"
            alike = len({map_.shape for map_ in maps}) == 1
            arrays |= {called: np.stack(maps)} if alike else {f"{called}_{at}": map_ for at, map_ in enumerate(maps)}
    else:
        (rows,) = inferred.logits.values()
        arrays |= {kind: rows.numpy()} | ({"top1": rows.argmax(1).numpy()} if kind == LOGITS else {})
    write_arrays(target, arrays)
    log.info("%d pictures, %s", len(inferred.names), name)
    return target
