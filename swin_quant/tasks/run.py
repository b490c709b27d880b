"""An artifact on pictures: its logits in a file for other programs."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from swin_quant.backends.artifact import Artifact
from swin_quant.base.errors import listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.data.pictures import Pictures
from swin_quant.engines.infer import Inferred, infer
from swin_quant.tasks.deployed import config_of, load_engines, one_engine, preprocess_of
from swin_quant.tasks.verify import Verifying


def run_artifact(artifact: Artifact, pictures: Callable[[], Pictures], folder: str | Path, how: Verifying) -> Path:
    """Write <ARTIFACT>_logits.npz into `folder`: names [N], logits float32 [N, classes], top1 and labels int64 [N].

    `how` says the engine, one of `engines`, and how pictures are read. Pictures that cannot be read are left out.
    """
    name = one_engine(artifact, how.engines)
    cfg, shown = config_of(artifact), pictures()
    target = ensure_writable_dir(folder) / f"{artifact.file.stem}_logits.npz"
    engines = load_engines(artifact, [name], how.options)
    inferred = infer(
        engines,
        shown,
        preprocess_of(artifact),
        cfg.MODEL.NUM_CLASSES,
        batch_size=how.batch_size,
        workers=how.workers,
        max_unreadable=how.max_unreadable,
    )
    if inferred.unreadable:
        log.warning("left out, unreadable: %s", listed(inferred.unreadable))
    atomic_write_bytes(target, _npz(inferred))
    log.info("%d pictures, %s: %s", len(inferred.names), name, target)
    return target


def _npz(inferred: Inferred) -> memoryview:
    (logits,) = inferred.logits.values()
    content = io.BytesIO()
    np.savez(
        content,
        names=np.array(inferred.names),
        logits=logits.numpy(),
        top1=logits.argmax(1).numpy(),
        labels=inferred.labels.numpy(),
    )
    return content.getbuffer()
