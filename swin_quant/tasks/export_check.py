"""`swin-quant export --check` of an ONNX file: does it compute what the model computes, before it leaves the house?"""

import torch

from swin_quant.backends import engine_loader
from swin_quant.backends.artifact import Artifact
from swin_quant.base.errors import SwinQuantError
from swin_quant.config.outputs import LOGITS
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import names_of_engines
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policy import policy_from_dict
from swin_quant.score.baseline import engines_beside, unnamed_baseline
from swin_quant.score.bench import noise
from swin_quant.score.difference import difference, difference_of_outputs
from swin_quant.score.options import EngineOptions
from swin_quant.tasks.verify import is_quantized, tolerance_of

PICTURES = 4


def check_export(artifact: Artifact, model: Classifier) -> str:
    """Run the artifact on seeded noise on the first engine installed; a sentence with its distance from the model.

    The reference is fake-quant for what is quantized, else float32. SwinQuantError beyond `verify`'s tolerance.
    """
    name = names_of_engines(artifact, None)[0]
    record, policy = artifact.record, artifact.card.policy
    policies = [policy_from_dict(policy, artifact.card.name)] if policy and is_quantized(record["precision"]) else []
    engines = engines_beside(model, torch.device("cpu"), None, policies, unnamed_baseline(artifact.card))
    label, reference = next(pair for pair in engines.items() if pair[1].policy or not policies)
    count = record["options"].get("batch") or PICTURES
    images = noise(count, model.in_chans, model.image_size).images
    if record["options"].get("uint8_input"):
        preprocess = Preprocess.from_dict(artifact.card.preprocess)
        images = preprocess.normalised(preprocess.pixels(images))  # noise that pixels can say
    with torch.inference_mode():
        given, expected = engine_loader(name)(artifact, EngineOptions())(images), reference(images)
    has_logits = model.output_kind == LOGITS
    found = difference(given, expected) if has_logits else difference_of_outputs([given], [expected])
    limit = tolerance_of(name, record["precision"], record["options"].get("float_type"))
    text = (
        f"{name} against {reference.name} {label}, {count} seeded pictures: mean |Δlogit| {found['mean']:.3g} "
        f"(limit {limit:g}), max {found['max']:.3g}"
    )
    if not found["mean"] < limit:
        raise SwinQuantError(f"{artifact.file}: is not what the model computes: {text}")
    return text
