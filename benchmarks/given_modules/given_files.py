"""Make files for the cases of docs/results/given.md, and run the tool on them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "checkpoints"
MEAN, STD = (torch.tensor(values).view(1, 3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
HUB = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "window_size": 4, "depths": [2, 2, 6, 2]}
HUB |= {"num_heads": [1, 2, 4, 8], "architectures": ["SwinForImageClassification"]}
PROCESSOR = {"do_resize": True, "size": {"height": 32, "width": 32}, "do_rescale": True, "do_normalize": True}
PROCESSOR |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3}


def weights(name: str = "swin") -> dict[str, Tensor]:
    """An example's weights under Microsoft's names."""
    from safetensors.torch import load_file

    return load_file(EXAMPLES / f"{name}_micro_cifar10.safetensors")


def config(name: str = "swin") -> Path:
    return EXAMPLES / f"{name}_micro_cifar10.yaml"


def normalising(largest: int = 1) -> dict[str, Tensor]:
    """An example's weights for pictures from 0 to `largest`, which the first layer normalises."""
    state = weights()
    kernel, bias = state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]
    state["patch_embed.proj.bias"] = bias - (kernel * MEAN / STD).sum((1, 2, 3))
    state["patch_embed.proj.weight"] = kernel / STD / largest
    return state


def permuted(folder: Path, names: list[str]) -> Path:
    """A hub folder whose head has the classes in another order, given by its `id2label`."""
    state, order = weights(), torch.randperm(10, generator=torch.Generator().manual_seed(1))
    state["head.weight"], state["head.bias"] = state["head.weight"][order], state["head.bias"][order]
    labels = {str(place): names[index] for place, index in enumerate(order.tolist())}
    return repository(folder, state, {"id2label": labels}, {})


def noise() -> Tensor:
    """Four pictures of normal noise [4, 3, 32, 32], always the same."""
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def repository(folder: Path, state: dict[str, Tensor], more: dict[str, Any], processor: dict[str, Any]) -> Path:
    """A folder as on the hub."""
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")
    kind = "swinv2" if any(key.endswith("logit_scale") for key in state) else "swin"
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **HUB, **more}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **processor}))
    return folder


def accuracy(checkpoint: Path, pictures: Path, **options: Any) -> str:
    """Top-1 of the float model on PICTURES/val, from `evaluate`."""
    import swin_quant as sq

    scored = sq.evaluate(sq.load(checkpoint, **options), sq.pictures(pictures, "val"), half="none")
    return f"{scored.results[0].acc1:.1f} %"


def distance(checkpoint: Path, reference: Tensor, images: Tensor, **options: Any) -> str:
    """The largest difference of logits from `reference`."""
    import swin_quant as sq

    with torch.inference_mode():
        return f"logits off by {(sq.load(checkpoint, **options).module(images) - reference).abs().max():.1e}"


def logits(name: str, images: Tensor, state: dict[str, Tensor] | None = None, **keys: Any) -> Tensor:
    """An example's logits from our module, which tests compare with timm's."""
    from swin_quant.config import load_config
    from swin_quant.models import build_model

    model = build_model(load_config(config(name), overrides=keys))
    model.load_state_dict(state or weights(name), strict=False)
    with torch.inference_mode():
        return model.eval()(images)


def command(*words: Any, seconds: float = 300) -> "subprocess.CompletedProcess[str]":
    """The output and the end of `swin-quant WORDS`."""
    run = [sys.executable, "-m", "swin_quant", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True, timeout=seconds)


def answer(done: "subprocess.CompletedProcess[str]", about: str = "") -> str:
    """The accuracies in the card that a command printed, or its refusal; and the log line that holds `about`."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return f"exit {done.returncode}: {(lines or done.stdout.splitlines() or ['nothing said'])[-1]}"
    results = [result for result in json.loads(done.stdout)["results"] if result["precision"] != "bfloat16"]
    found = ", ".join(f"{result['precision']} {result['acc1']:.1f} %" for result in results)
    line = next((line for line in lines if about in line), "nothing said") if about else ""
    return found + (f"; {line}" if line else "")


def calibrated(checkpoint: Path, data: Path) -> "subprocess.CompletedProcess[str]":
    """Run `calibrate` on an example's weights with 16 pictures, scored on val; prints the run card."""
    out = checkpoint.parent / "out"
    done = command("calibrate", checkpoint, "--cfg", config(), "--data-path", data, "--pictures", 16, "--output", out)
    done.stdout = next((card.read_text() for card in sorted(out.rglob("*.json"))), "")
    return done


def renamed(source: Path, target: Path, names: dict[str, str]) -> Path:
    """The class folders of a split under other names."""
    for folder in sorted(source.iterdir()):
        shutil.copytree(folder, target / names.get(folder.name, folder.name))
    return target


def classes(pictures: Path) -> list[str]:
    return sorted(folder.name for folder in (pictures / "val").iterdir())


def exported(engine: str, folder: Path) -> Any:
    """The example, calibrated on noise and exported for an engine."""
    import swin_quant as sq

    model = sq.load(EXAMPLES / "swin_micro_cifar10.safetensors")
    sq.calibrate(model, [torch.randn(8, 3, 32, 32)], "qdq")
    return sq.export(model, engine, folder / "out")


def calibrate_on(images: Tensor) -> str:
    """The outcome of `sq.calibrate` on a batch of tensors."""
    import swin_quant as sq

    model = sq.load(EXAMPLES / "swin_micro_cifar10.safetensors")
    sq.calibrate(model, [images], "qdq")
    return "calibrated"


def pixels(pictures: Path) -> Tensor:
    """Eight pictures, uint8 [8, 3, 32, 32]."""
    import numpy as np
    from PIL import Image

    files = sorted((pictures / "val").glob("*/*"))[:8]
    return torch.stack([torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) for file in files])


def stored(folder: Path, content: Any, **options: Any) -> str:
    """How far a saved object's logits are from its example's."""
    images = noise()
    torch.save(content, folder / "swin.pth")
    return distance(folder / "swin.pth", logits("swin", images), images, config=config(), **options)


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}
