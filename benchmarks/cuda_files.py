"""Float models calibrated and exported to the CUDA engine under each policy, and pictures: for cuda_accuracy.py."""

from pathlib import Path

FLOAT = "float16"
SOFTMAX = "role:softmax_output"


def policies():
    """Those that the engine runs, by the names of the tables; None: its half form."""
    from swin_quant.quant.policies import load_policy
    from swin_quant.quant.policy import Rule

    half = load_policy("cuda").and_then(Rule(disable=(SOFTMAX,)))
    int8 = load_policy("cuda").and_then(Rule(enable=(SOFTMAX,)))
    return {
        FLOAT: None,
        "cuda": load_policy("cuda"),
        "cuda-fp8": load_policy("cuda-fp8"),
        "cuda, softmax half": half,
        "cuda, softmax int8": int8,
        "ft-mode1": load_policy("ft-mode1"),
        "ft-mode2": load_policy("ft-mode2"),
    }


def calibrated(config: Path, weights: Path, data_path: str):
    """A float model with ranges, its config, and the training pictures that they are from."""
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


def pictures_of(cfg, data_path: str, split: str):
    from swin_quant.data.sources import open_pictures

    return open_pictures(data_path, split, zip_mode=True, cache_mode="no", num_classes=cfg.MODEL.NUM_CLASSES)


def shown(cfg, data_path: str, split: str, count: int, left_out: set[int], batch: int):
    """Batches of `count` pictures of a split."""
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import chunks

    pictures = pictures_of(cfg, data_path, split)
    step = max(1, len(pictures) // count)
    chosen = [i for i in range(0, len(pictures), step) if split != "train" or i not in left_out][:count]
    return list(load_batches(pictures, Preprocess.from_config(cfg), chunks(chosen, batch)))


def exported(model, cfg, wanted: tuple[str, ...], folder: str):
    """The files of the engine by the names of `policies`."""
    from swin_quant.backends.cuda.export import CudaOptions, export
    from swin_quant.cards.card import RunCard
    from swin_quant.quant.policies import load_policy
    from swin_quant.quant.policy import apply_policy

    made = {}
    for each, policy in policies().items():
        if each in wanted and not (each == "ft-mode2" and cfg.MODEL.TYPE == "swinv2"):
            chosen = policy or load_policy("float")
            apply_policy(model, chosen)
            card = RunCard(f"{cfg.MODEL.NAME} {each}", {}, {}, policy=chosen.to_dict())
            made[each] = export(model, card, Path(folder), CudaOptions("int8" if policy else "float"))
    return made
