"""Run cards with given results, and what they record of a calibration and of a training."""

from swin_quant.cards.card import RunCard

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


def card_of(*results, name="swin_tiny", size=32, calibration=CALIBRATION, sha256="a" * 64, **changes) -> RunCard:
    """A card of the float checkpoint `sha256` with `results`; `changes` are to its calibration."""
    source = {"file": "x.pth", "sha256": sha256, "format": "pth"}
    card = RunCard(name, {}, {"size": size}, source=source, calibration=calibration and {**calibration, **changes})
    for one in results:
        card = card.with_result(one)
    return card
