"""A third-party backend: it exports a checkpoint in its own format, and its engine simulates it."""

import torch

from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.backend import Backend, Exports, Tolerances
from swin_quant.checkpoint import load_calibrated, load_float, save_calibrated, save_float
from swin_quant.config import from_dict
from swin_quant.models import build_model
from swin_quant.quant.policy import apply_policy, enabled_nodes, policy_from_dict, quantize
from swin_quant.score.engine import Engine

BACKEND = Backend(
    name="toy",
    exports=Exports(
        artifact="toy",
        export="toy_backend:export",
        options="toy_backend:options",
        policies=("qdq",),
        flags=("batch",),
        next_step=("swin-quant verify {file}",),
    ),
    runs=("toy",),
    load="toy_backend:load",
    tolerances=Tolerances(quantized=1e-5, float32=1e-5, half=1e-5),
)


def options(precision, batch=None):
    return {"precision": precision, "batch": batch}


def export(model, card, folder, options):
    file = folder / f"{card.name}_{options['precision']}.toy"
    quantized = bool(enabled_nodes(model))
    (save_calibrated if quantized else save_float)(model, file)
    return finish_artifact(file, card, "toy", "int8" if quantized else "float32", options)


def load(artifact, options):
    model = build_model(from_dict(artifact.card.config, "toy"))
    policy = artifact.card.policy
    (load_calibrated if policy else load_float)(model, artifact.file)
    if policy:
        apply_policy(model, policy_from_dict(policy, "toy"))
        quantize(model)
    model.to(options.device)

    def run(images):
        return model(images.to(options.device)).to(images.device)

    batch = artifact.record["options"]["batch"]
    precision, name = artifact.record["precision"], policy and policy["name"]
    return Engine("toy", precision, name, run, max_batch=batch, device=str(torch.device(options.device)))
