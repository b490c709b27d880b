"""`calibrate` in memory."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError, called
from swin_quant.base.progress import log, track
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.records import CalibrationRecord, SourceRecord
from swin_quant.cards.versions import versions
from swin_quant.data.class_names import stated
from swin_quant.data.picture_set import PictureSet, Source, batches
from swin_quant.model import Model
from swin_quant.quant.calibration import Method
from swin_quant.quant.names import DEFAULT_PERCENTILE
from swin_quant.quant.passes.recipe import load_passes, steps_of
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.passes.state import all_or_nothing
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.tasks.calibrate import CalibrationPlan, calibrate_pictures, tell_unnamed, unnamed_policy
from swin_quant.tasks.calibration_found import Found, calibrate_numbered, found_by
from swin_quant.tasks.passes import PassPlan

BATCHES, BATCH_SIZE = 10, 8  # those of the command


def calibrate(
    model: Model | nn.Module,
    pictures: Source,
    policy: str | Policy | None = None,
    *,
    method: str | None = None,
    percentile: float = DEFAULT_PERCENTILE,
    exact: bool = False,
    passes: str | Sequence[Any] | None = None,
    folder: str | Path | None = None,
) -> Model:
    """Find the range of every node of `model` on `pictures`, and apply `policy`; the model is changed, and returned.

    `policy` None: ft-mode1 of a Swin, qdq of all else.
    The ranges are those of `swin-quant calibrate` on the same pictures, to the bit, whatever the batches. `method` None
    is the one that suits a node's bits, "auto" chooses it node by node, by what its range costs. A warning says where
    the ranges lose the signal, and which method does better; `card.calibration` keeps all advice.
    `passes` come behind it: a recipe's name or file, or a list of passes, names or `{"name": ..., option: ...}`; None
    evens out channels that stand out, where there are any; [] does nothing. In `folder` long passes keep what they have
    done until all is: the same call goes on where one was cut off, and finds the same. An error or an interrupt leaves
    the model as it was. SwinQuantError for NaN or infinity in weights or activations, naming the module.
    """
    model = model if isinstance(model, Model) else Model(model)
    if policy is None:
        policy = unnamed_policy(model.config if model.card.config else None)
        tell_unnamed(policy)
    policy = load_policy(policy) if isinstance(policy, str) else policy
    if isinstance(passes, str):
        plan = PassPlan.of(load_passes(passes))
    else:
        plan = PassPlan(steps_of([] if passes is None else passes), automatic=passes is None)
    with called(calibrator="method"):
        how, world = Method(method, percentile, exact), World(device=model.device)
    source = _source(model)  # before passes change its weights
    before = model.card if model.card.has_own_weights or model.card.calibration else None
    scratch = Scratch(Path(folder) / f"{model.name}_calib.passes") if folder is not None else Scratch()
    with all_or_nothing(model.module):
        apply_policy(model.module, policy)
        plan = plan.for_model(model.module)
        if isinstance(pictures, PictureSet):
            found, seen = _on_pictures(model, pictures, how, world)
        else:
            found, seen = _on_batches(model, pictures, how), []
        found = found.improved(model.module, plan, world, before, scratch)
        record = found.checked(model.module, policy, world)
    model.card = replace(
        model.card,
        source=source,
        policy=policy.to_dict(),
        calibration=record,
        training=calibrated_again(before),
        checkpoint=None,
        results=[],
        verification=[],
        sensitivity=None,
        searches=[],
        versions=versions(),
        class_names=model.class_names or _stated(model, seen),
    )
    model.calibration, model.file = found.calibration, None
    scratch.clear()
    return model


def _source(model: Model) -> SourceRecord | None:
    """The float file that the model was loaded from, if its weights are that file's own; else what its card says."""
    card, file = model.card, model.file
    if model.is_changed:
        return None
    if file is None or card.checkpoint is None or card.calibration or card.is_qat:
        return card.source
    kind, place = card.source["format"] if card.source else "swin-quant", str(file.resolve())
    return SourceRecord(file=card.checkpoint["file"], sha256=card.checkpoint["sha256"], format=kind, path=place)


def _stated(model: Model, seen: Sequence[str]) -> list[str]:
    """Class names of the pictures, where a model has as many."""
    with contextlib.suppress(UsageError):  # it need not say how many classes it has
        return stated(seen, model.classes) if seen else []
    return []


def _on_pictures(model: Model, pictures: PictureSet, method: Method, world: World) -> tuple[Found, Sequence[str]]:
    """What was found, and the names of the pictures' classes."""
    pictures = pictures.of_split("train")
    opened = pictures.open()
    if pictures.upright not in (None, model.preprocess.upright):
        log.warning("%s: calibrated on pictures that are turned otherwise than those that it will be served: set "
                    "DATA.UPRIGHT of its config, or `upright` of its preprocess", model.name)  # fmt: skip
    count = min(len(opened), BATCHES * BATCH_SIZE) if pictures.count is None else pictures.count
    size = next(size for size in range(BATCH_SIZE, 0, -1) if count % size == 0)  # ranges do not depend on it
    plan = CalibrationPlan(count // size, size, pictures.split or "", pictures.seed, method=method)
    return calibrate_pictures(model.module, opened, model.preprocess, plan, world), opened.class_names


def _on_batches(model: Model, source: Iterable[Any], method: Method) -> Found:
    seen = hashlib.sha256()
    sizes: list[int] = []

    def numbered() -> Iterator[tuple[int, Tensor]]:  # by their first picture: batches are of any size
        total = len(source) if isinstance(source, Sized) else None
        for batch in track(batches(source, labelled=False, prepared=model.prepared), "calibrating", total):
            first = sum(sizes)
            seen.update(batch.images.numpy(force=True).tobytes())
            sizes.append(len(batch.images))
            yield first, batch.images.to(model.device)

    calibration, some, kept = calibrate_numbered(model.module, numbered(), method, 1)
    record = CalibrationRecord(
        exact=method.exact,
        batches=len(sizes),
        batch_size=max(sizes),
        seed=0,
        split="",
        augment=False,
        pictures=calibration.pictures,
        pictures_sha256=seen.hexdigest(),  # of their values: they have no names
        files=[],
        unreadable=[],
        beyond_half=calibration.beyond_half,
        check=None,
        statistics=None,
        advice=[],
        **found_by(method, model.module, calibration),
    )
    return Found(calibration, record, method, some, kept)
