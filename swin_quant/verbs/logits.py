"""An artifact on pictures: its logits in a file for other programs."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.base.errors import listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.config.outputs import FEATURES, LOGITS, classes_of
from swin_quant.data.pictures import Pictures
from swin_quant.exported import config_of, load_engines, one_engine, preprocess_of
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import Inferred, infer


def write_logits(
    artifact: Artifact,
    pictures: Callable[[], Pictures],
    folder: str | Path,
    engines: Sequence[str] | None,
    options: EngineOptions,
    batch_size: int = 32,
    workers: int = 0,
    max_unreadable: float = 0.01,
) -> Path:
    """Write <ARTIFACT>_logits.npz into `folder`: names [N], logits float32 [N, classes], top1 and labels int64 [N].

    An embedding is `embedding`, float32 [N, channels], in <ARTIFACT>_embedding.npz. Maps are `features0` to `features3`
    by stage, [N, C, h, w], in <ARTIFACT>_features.npz; where pictures have several sizes, those of picture 7 are
    `features0_7`, [C, h, w].
    It runs on one of `engines`. Pictures that cannot be read are left out.
    """
    name = one_engine(artifact, engines)
    cfg, shown = config_of(artifact), pictures()
    kind = cfg.MODEL.OUTPUT_KIND
    target = ensure_writable_dir(folder) / f"{artifact.file.stem}_{kind}.npz"
    inferred = infer(
        load_engines(artifact, [name], options),
        shown,
        preprocess_of(artifact),
        classes_of(cfg),
        batch_size=batch_size,
        workers=workers,
        max_unreadable=max_unreadable,
    )
    if inferred.unreadable:
        log.warning("left out, unreadable: %s", listed(inferred.unreadable))
    arrays = _maps(inferred, cfg) if kind == FEATURES else _rows(inferred, kind)
    atomic_write_bytes(target, _npz(inferred, arrays))
    log.info("%d pictures, %s: %s", len(inferred.names), name, target)
    return target


def _rows(inferred: Inferred, kind: str) -> dict[str, np.ndarray]:
    (rows,) = inferred.logits.values()
    return {kind: rows.numpy()} | ({"top1": rows.argmax(1).numpy()} if kind == LOGITS else {})


def _maps(inferred: Inferred, cfg: CfgNode) -> dict[str, np.ndarray]:
    (outputs,) = inferred.outputs.values()
    arrays: dict[str, np.ndarray] = {}
    for place, parts in enumerate(zip(*outputs, strict=True)):
        maps = [map_.numpy() for part in parts for map_ in part]
        name = f"{FEATURES}{(cfg.MODEL.FEATURES.STAGES or range(len(outputs[0])))[place]}"
        alike = len({map_.shape for map_ in maps}) == 1
        arrays |= {name: np.stack(maps)} if alike else {f"{name}_{number}": map_ for number, map_ in enumerate(maps)}
    return arrays


def _npz(inferred: Inferred, arrays: dict[str, np.ndarray]) -> memoryview:
    content = io.BytesIO()
    np.savez(content, names=np.array(inferred.names), labels=inferred.labels.numpy(), **arrays)  # type: ignore[arg-type]  # a name may be allow_pickle, to mypy
    return content.getbuffer()
