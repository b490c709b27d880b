"""What of a quantization is done: by what the files of its folder say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.registry import engine_named
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import parts_of, sha256_of
from swin_quant.base.journal import plain
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord
from swin_quant.checkpoint.opened import OpenedCheckpoint, made_before
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.quant.calibration import Method
from swin_quant.saving import place_of
from swin_quant.score.engine import HALF_TYPES
from swin_quant.verbs.calibration_passes import of_weights
from swin_quant.verbs.verify import failures

if TYPE_CHECKING:
    from swin_quant.verbs.quantize_steps import Quantization

_FILES = {"RESUME", "PRETRAINED"}  # keys of MODEL that say nothing of it


def calibrated_place(asked: Quantization) -> Path:
    """Where the calibrated checkpoint lies, whatever its name, or will be written."""
    holds = partial(_is_as_asked, asked)
    return place_of(asked.folder, asked.cfg.MODEL.NAME, asked.policy.to_dict(), holds, tell=False)


def is_calibrated(asked: Quantization) -> bool:
    """Whether the calibrated checkpoint is there, made from the same weights and pictures in the same way."""
    return _is_as_asked(asked, asked.calibrated)


def _is_as_asked(asked: Quantization, file: Path) -> bool:
    return _changed(asked, file) == []


def changed(asked: Quantization) -> list[str] | None:
    """What is asked for otherwise than the calibrated checkpoint was made; None where there is none."""
    usual = asked.folder / f"{asked.cfg.MODEL.NAME}_calib.pth"
    return _changed(asked, asked.calibrated if asked.calibrated.is_file() else usual)


def _changed(asked: Quantization, file: Path) -> list[str] | None:
    card = _card(file)
    if card is None or card.calibration is None or card.source is None or card.checkpoint is None:
        return None
    record, plan = card.calibration, asked.plan
    before = made_before(asked.checkpoint)
    earlier = of_weights(before)
    same = {
        "the checkpoint": _same_weights(card, before, asked.checkpoint),
        "the calibrated file": card.checkpoint["sha256"] == _sha256(file),
        "the policy": (card.policy or {}).get("rules") == asked.policy.to_dict()["rules"],
        "the model": _same_model(card, asked.cfg),
        "the preprocessing": card.preprocess == Preprocess.from_config(asked.cfg).to_dict(),
        "the calibrator": _same_method(record, plan.method),
        "the percentile": record.get("tried_percentile", record["percentile"]) in (None, plan.method.percentile),
        "the passes": of_weights(card)[: len(earlier)] == earlier
        and plan.passes.made(record.get("passes", [])[len(earlier) :], record.get("advice", [])),
    }
    different = [what for what, is_same in same.items() if not is_same]
    return different if _same_pictures(record, card, asked) else [*different, "the pictures"]


def _same_method(record: CalibrationRecord, method: Method) -> bool:
    chosen = "node_methods" in record  # for each node: calibrator auto
    methods = {bits: method.for_bits(int(bits)) for bits in record.get("methods", {})}
    same = (record["exact"], chosen) == (method.exact, method.is_auto)
    return same and (chosen or record.get("methods") == methods)


def _same_weights(card: RunCard, before: RunCard | None, checkpoint: OpenedCheckpoint) -> bool:
    """Whether a card's weights are those of `checkpoint`, or its calibrated ones, of which `before` is the card."""
    if card.source is None or before is None or before.source is None:
        return card.source is not None and card.source["sha256"] == checkpoint.sha256
    trained = replace(before, training=calibrated_again(before))
    return (
        card.source["sha256"] == before.source["sha256"]
        and without_paths(card)["training"] == without_paths(trained)["training"]
    )


def _same_model(card: RunCard, cfg: CfgNode) -> bool:
    """By the keys that both know: a newer version may have more."""
    before, now = card.config["MODEL"], plain(portable_config(cfg)["MODEL"])
    return all(before[key] == now[key] for key in before.keys() & now.keys() - _FILES)


def _same_pictures(record: CalibrationRecord, card: RunCard, asked: Quantization) -> bool:
    """Whether the same calibrated; the data are only opened where nothing else tells."""
    plan, count = asked.plan, asked.plan.pictures
    if (
        card.config["DATA"]["DATA_PATH"] != Path(asked.cfg.DATA.DATA_PATH).name
        or record["pictures"] > count
        or (record["split"], record["seed"], record["augment"]) != (plan.split, plan.seed, plan.augment)
    ):
        return False
    try:
        readable = (name for name in asked.calibrated_on if name not in record["unreadable"])
    except SwinQuantError:  # whoever calibrates says what is wrong with them
        return False
    seen = list(islice(readable, count))  # fewer than were asked for, where the data hold no more
    return record["pictures"] == len(seen) and record["pictures_sha256"] == digest(seen)


def is_found(asked: Quantization) -> bool:
    """Whether the policy is there, found for the calibrated checkpoint."""
    return is_calibrated(asked) and asked.exported_policy is not None


def artifact_of(asked: Quantization) -> Artifact | None:
    """What was exported from the calibrated checkpoint for the backend, under the policy, if it is whole."""
    if not is_calibrated(asked) or (policy := asked.exported_policy) is None:
        return None
    sha256, rules = _sha256(asked.calibrated), policy.to_dict()["rules"]
    exports = asked.target.exports
    targets = (asked.target.name, exports.fixed.get("target") if exports else None)  # or an ONNX file for any engine
    for file in sorted(asked.folder.glob("*.json")):
        try:
            card = RunCard.read(file)
            if card.artifact is None or card.checkpoint is None or card.checkpoint["sha256"] != sha256:
                continue
            options = card.artifact["options"]
            is_ours = options.get("target", card.artifact["backend"]) in targets and _has_floats(options, asked)
            if is_ours and (card.policy or {}).get("rules") == rules:
                return open_artifact(file.with_name(card.artifact["file"]))
        except SwinQuantError:  # some other JSON, or a file that was changed: it is exported again
            continue
    return None


def _has_floats(options: Mapping[str, Any], asked: Quantization) -> bool:
    """Whether what is not int8 was exported in the type that is asked for."""
    exports = asked.target.exporting
    wanted = asked.float_type or exports.float_type
    return "float_type" not in exports.flags or options.get("float_type", wanted) == wanted


def is_verified(asked: Quantization) -> bool:
    """Whether the artifact was found to compute what the model computes, with the floats that are asked for."""
    made = artifact_of(asked)
    records = [one for one in made.card.verification if _ran_as_asked(one["precision"], made, asked)] if made else []
    return bool(records) and not failures(records)


def is_scored(asked: Quantization) -> bool:
    """Whether the artifact has a result on the pictures of the data path, with the floats that are asked for."""
    made = artifact_of(asked)
    if made is None:
        return False
    results = [one for one in made.card.measured() if one.policy and _ran_as_asked(one.precision, made, asked)]
    return any(result.dataset == asked.scored_on for result in results)


def _ran_as_asked(precision: str, made: Artifact, asked: Quantization) -> bool:
    """Whether an engine of that precision ran what is not int8 as asked for.

    One that chooses the type adds it where it is half; of others `artifact_of` knows it.
    """
    if asked.engine is None or not engine_named(asked.engine).float_types:
        return True
    if asked.options.timing.float_type in HALF_TYPES:
        return precision.endswith(f"+{asked.options.timing.float_type}")
    return precision not in [f"{made.record['precision']}+{half}" for half in HALF_TYPES]


def _sha256(file: str | Path) -> str:
    """As `sha256_of`; a file that every step of a run asks for is read once, and anew if it was written since."""
    path = Path(file)
    if not path.is_file() or parts_of(path):
        return sha256_of(file)
    now = path.stat()
    return _hashed(path.resolve(), now.st_mtime_ns, now.st_size)


@lru_cache(maxsize=16)
def _hashed(path: Path, written: int, size: int) -> str:
    return sha256_of(path)


def _card(file: Path) -> RunCard | None:
    try:
        return RunCard.read(card_path(file)) if file.is_file() and card_path(file).is_file() else None
    except SwinQuantError:
        return None
