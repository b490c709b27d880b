"""Helpers of cuda_accuracy.py: calibrate float models, export them in each form, make each form's reference, and read
pictures."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from swin_quant.data.pictures import Pictures

FLOAT, BFLOAT, BYTES = "float16", "cuda, bfloat16", "cuda, uint8"
SOFTMAX = "role:softmax_output"
TORCH, FAKE_QUANT, EMULATOR = "torch, float32", "fake-quant", "FasterTransformer's emulator"
DIGITS, SIDE = "digits", 32
MOVED, MOST_DEGREES, MOST_PIXELS = 15, 15.0, 2.0  # pictures from one digit; largest rotation and shift


@dataclass(frozen=True)
class Form:
    """A file of the engine: its policy, its export options, and the arithmetic that it must match."""

    policy: Any
    equals: str = FAKE_QUANT
    options: dict[str, Any] = field(default_factory=dict)


def forms() -> dict[str, Form]:
    """The forms that the engine runs, by their names in the tables."""
    from swin_quant.quant.policy import Rule, load_policy

    cuda = load_policy("cuda")
    return {
        FLOAT: Form(load_policy("float"), TORCH, {"precision": "float"}),
        "cuda": Form(cuda),
        "cuda-fp8": Form(load_policy("cuda-fp8")),
        BFLOAT: Form(cuda, options={"float_type": "bfloat16"}),
        BYTES: Form(cuda, options={"uint8_input": True}),
        "cuda, softmax half": Form(cuda.and_then(Rule(disable=(SOFTMAX,)))),
        "cuda, softmax int8": Form(cuda.and_then(Rule(enable=(SOFTMAX,)))),
        "ft-mode1": Form(load_policy("ft-mode1"), EMULATOR),
        "ft-mode2": Form(load_policy("ft-mode2"), EMULATOR),
    }


def calibrated(config: Path, weights: Path, data_path: str):
    """A calibrated float model, its config, and the indices of the calibration pictures."""
    from swin_quant.checkpoint import load_float
    from swin_quant.config import load_config
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import chunks, sample
    from swin_quant.models import build_model
    from swin_quant.quant.calibration import Method, observe, set_ranges

    cfg = load_config(config)
    model = build_model(cfg).eval()
    load_float(model, weights)
    train = pictures_of(cfg, data_path, "train")
    calibrating = sample(len(train), 80, 0)
    batches = load_batches(train, Preprocess.from_config(cfg), chunks(calibrating, 8))
    set_ranges(model, observe(model, [batch.images for batch in batches]), Method("percentile"))
    return model, cfg, set(calibrating)


class MovedDigits(Pictures):
    """Each digit unchanged, and rotated and shifted by random amounts: more pictures with the same labels."""

    def __init__(self, digits: Pictures) -> None:
        self.digits = digits
        self.names = [f"{name}/{turn}" for turn in range(MOVED) for name in digits.names]
        self.labels = [*digits.labels] * MOVED
        self.class_names = digits.class_names

    def open(self, index: int) -> Image.Image:
        turn, which = divmod(index, len(self.digits))
        image = self.digits.open(which).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        if not turn:
            return image
        draw = random.Random(index)
        shift = draw.uniform(-MOST_PIXELS, MOST_PIXELS), draw.uniform(-MOST_PIXELS, MOST_PIXELS)
        return image.rotate(draw.uniform(-MOST_DEGREES, MOST_DEGREES), Image.Resampling.BICUBIC, translate=shift)


def pictures_of(cfg, data_path: str, split: str) -> Pictures:
    """A split; for scoring digits, which are few, with moved copies."""
    from swin_quant.data.sources import open_pictures

    found = open_pictures(data_path, split, zip_mode=True, num_classes=cfg.MODEL.NUM_CLASSES)
    return MovedDigits(found) if data_path == DIGITS and split == "val" else found


def shown(cfg, data_path: str, split: str, count: int, left_out: set[int], batch: int):
    """Batches of at most `count` pictures of a split."""
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import chunks

    pictures = pictures_of(cfg, data_path, split)
    step = max(1, len(pictures) // count)
    chosen = [i for i in range(0, len(pictures), step) if split != "train" or i not in left_out][:count]
    return list(load_batches(pictures, Preprocess.from_config(cfg), chunks(chosen, batch)))


def runs(cfg, name: str) -> bool:
    """Whether the engine has a form of a model: FasterTransformer's kernels have no second mode for V2."""
    return not (name == "ft-mode2" and cfg.MODEL.TYPE == "swinv2")


def exported(model, cfg, name: str, folder: str):
    """The engine's file in a form."""
    from swin_quant.backends.cuda.export import CudaOptions, export

    form = forms()[name]
    return export(_under(model, form.policy), _card(cfg, name, form), Path(folder), CudaOptions(**form.options))


def reference(model, cfg, name: str, folder: str, device):
    """The reference of a form, from the same calibrated model, which is moved to the device."""
    from swin_quant.backends.fastertransformer.emulator import Emulator
    from swin_quant.backends.fastertransformer.export import export
    from swin_quant.backends.fastertransformer.manifest import read_export
    from swin_quant.score.engine import torch_engines

    form = forms()[name]
    if form.equals == EMULATOR:
        made = export(_under(model, form.policy), _card(cfg, name, form), Path(folder, "ft"))
        model.to(device)
        return Emulator(read_export(made), fused=True, device=str(device), misread=False)
    policies = [] if form.equals == TORCH else [form.policy]
    return list(torch_engines(model.to(device), device, None, policies).values())[-1]


def _under(model, policy):
    from swin_quant.quant.policy import apply_policy

    apply_policy(model.cpu(), policy)
    return model


def _card(cfg, name: str, form: Form):
    from swin_quant.cards.card import RunCard
    from swin_quant.data.preprocess import Preprocess

    preprocess = Preprocess.from_config(cfg).to_dict()
    return RunCard(f"{cfg.MODEL.NAME} {name}", {}, preprocess, policy=form.policy.to_dict())
