"""Which artifact of a quantization is there already, and whether it was verified and scored as is asked for now."""

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named
from swin_quant.base.cpu import cpu_kind
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.score.engine import HALF_TYPES
from swin_quant.verbs.quantization import Quantization, get_sha256
from swin_quant.verbs.verification import failures


def find_artifact(job: Quantization) -> Artifact | None:
    """The artifact of the calibrated checkpoint for the backend under the policy; None if missing or damaged."""
    if not job.is_calibrated or (policy := job.exported_policy) is None:
        return None
    sha256, exports = get_sha256(job.calibrated), job.target.exporting
    targets = (job.target.name, exports.fixed.get("target"))  # or an ONNX file for any engine
    float_type = job.float_type or exports.float_type
    for file in sorted(job.folder.glob("*.json")):
        try:
            card = RunCard.read(file)
            if card.artifact is None or card.checkpoint is None or card.checkpoint["sha256"] != sha256:
                continue
            options, tuned = card.artifact["options"], card.artifact.get("tuned")
            if job.tune or tuned:  # the one that took the least time on such a CPU
                is_chosen = job.tune and tuned is not None and tuned["cpu"] == cpu_kind()
            else:
                is_chosen = (card.policy or {}).get("rules") == policy.to_dict()["rules"]
            has_floats = "float_type" not in exports.flags or options.get("float_type", float_type) == float_type
            has_weights = bool(options.get("int4_weights")) == job.int4_weights
            is_ours = options.get("target", card.artifact["backend"]) in targets
            if is_ours and is_chosen and has_floats and has_weights:
                return open_artifact(file.with_name(card.artifact["file"]))
        except SwinQuantError:  # some other JSON, or a file that was changed: it is exported again
            continue
    return None


def is_verified(job: Quantization) -> bool:
    """Whether the artifact was found to compute what the model computes, with floats of the wanted type."""
    made = find_artifact(job)
    records = [one for one in made.card.verification if _ran_in_type(one["precision"], made, job)] if made else []
    return bool(records) and not failures(records)


def is_scored(job: Quantization) -> bool:
    """Whether the artifact has a result on the pictures of the data path, with floats of the wanted type."""
    made = find_artifact(job)
    if made is None:
        return False
    results = [one for one in made.card.measured() if one.policy and _ran_in_type(one.precision, made, job)]
    return any(result.dataset == job.scored_on for result in results)


def _ran_in_type(precision: str, made: Artifact, job: Quantization) -> bool:
    """Whether an engine of that precision ran float layers in the wanted type.

    An engine that chooses the type adds a half type to its precision; `find_artifact` checks all other engines.
    """
    if job.engine is None or not engine_named(job.engine).float_types:
        return True
    if job.float_type_asked in HALF_TYPES:
        return precision.endswith(f"+{job.float_type_asked}")
    return precision not in [f"{made.record['precision']}+{half}" for half in HALF_TYPES]
