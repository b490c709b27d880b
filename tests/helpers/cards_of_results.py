"""Run cards with given results, and what they record of a calibration, a training, a verification, an artifact."""

from dataclasses import replace

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result

CIFAR = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "1" * 64}
CALIBRATION = {
    **{"method": "percentile", "percentile": 99.99, "exact": False, "batches": 10, "batch_size": 8, "seed": 0},
    **{"split": "train", "augment": False, "pictures": 80, "pictures_sha256": "1" * 64, "files": [], "unreadable": []},
    **{"dead_nodes": [], "beyond_half": []},
}
TRAINING = {
    **{"recipe": {}, "seed": 0, "world": 1, "device": "cpu", "step_pictures": 8, "steps": 10, "pictures": 80},
    **{"pictures_sha256": "2" * 64, "start": None, "teacher": None, "best_epoch": 1, "epochs": []},
}
VERIFICATION = {
    **{"engine": "openvino", "precision": "int8", "policy": "qdq", "reference": "torch fake-quant", "pictures": 64},
    **{"pictures_sha256": "0" * 64, "mean": 0.01, "max": 0.5, "step": 0.05, "agreement": 98.4, "sqnr_db": 40.0},
    **{"tolerance": 0.1, "passed": True},
}
ARTIFACT = {
    **{"backend": "onnx", "file": "x.onnx", "sha256": "1" * 64, "precision": "int8", "options": {}, "others": []}
}
# Torch's float, an engine's own float, and int8 on that engine.
TORCH = Result("torch", "float32", None, CIFAR, 5000, 80.0, 98.0, None, 32, "cpu", ms_per_picture=0.5)
OWN = replace(TORCH, engine="openvino", ms_per_picture=1.4, delta_acc1=0.0, delta_acc1_se=0.0)
INT8 = replace(
    OWN, precision="int8", policy="openvino", acc1=79.9, ms_per_picture=0.7, delta_acc1=80 - 80.1, delta_acc1_se=0.1
)


def card_of(*results, name="swin_tiny", size=32, calibration=CALIBRATION, sha256="a" * 64, **changes) -> RunCard:
    """A card of the float checkpoint `sha256` with `results`; `changes` are to its calibration."""
    source = {"file": "x.pth", "sha256": sha256, "format": "pth"}
    card = RunCard(name, {}, {"size": size}, source=source, calibration=calibration and {**calibration, **changes})
    for one in results:
        card = card.with_result(one)
    return card
