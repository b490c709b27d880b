"""Train a micro Swin on digits, calibrate it, train it at 4 bits, score all on the engines: offline, in minutes."""

import math
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

from swin_quant.backends.registry import targets
from swin_quant.base.arguments import Parameter
from swin_quant.base.distributed import this_world
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.sources import DIGITS, open_pictures
from swin_quant.exported import SubjectFiles
from swin_quant.loading import ModelFile
from swin_quant.quant.policy import load_policy
from swin_quant.report.verdict import card_verdict
from swin_quant.train.run import Training
from swin_quant.verbs.calibrate import calibrate
from swin_quant.verbs.evaluate import evaluate
from swin_quant.verbs.evaluation import Evaluated, Evaluation
from swin_quant.verbs.export import export
from swin_quant.verbs.finetune import finetune
from swin_quant.verbs.report_page import write_page
from swin_quant.verbs.train import train

EXAMPLES = """swin-quant demo
swin-quant demo --model swinv2_digits --output out/demo2"""
FOUR_BITS, FOUR_BIT_EPOCHS, BATCH = "w4a4", 2, 64


def demo(
    model: Literal["swin_digits", "swinv2_digits"] = "swin_digits",
    *,
    epochs: int = 6,
    folder: Annotated[str | Path, Parameter(name="--output")] = "out/demo",
) -> Evaluated:
    """Train a micro Swin on digits, calibrate it, train it at 4 bits, score all on the engines: offline, in minutes.

    Args:
        model: which micro Swin
        epochs: epochs of the float training
        folder: folder of everything

    Returns:
        The table of all results, which are saved already, and the verdict on the fastest artifact.

    Raises:
        UsageError: scikit-learn, which has the digits, is not installed.
    """
    if epochs < 1:
        raise UsageError(f"‹epochs› {epochs}: must be at least 1")
    if (world := this_world()).size > 1:
        raise UsageError("the demo runs in one process: start it without torchrun")
    library("sklearn.datasets", "demo")  # the digits: named before anything is trained
    output, digits, val = ensure_writable_dir(folder), PictureSet(DIGITS, batch=BATCH), PictureSet(DIGITS, "val")
    log.info("1. train %s in float for %d epochs", model, epochs)
    how: dict[str, Any] = {"overwrite": True, "no_eval": True}
    trained = str(train(ModelFile(cfg=model), digits, output, Training("digits"), epochs=epochs, **how).file)

    log.info("2. calibrate on 10 x 8 pictures")
    int8 = calibrate(ModelFile(trained), PictureSet(DIGITS), "ft-mode1")
    int8.save_in(output, world)

    own = {name: one for name, one in targets().items() if one.runs_its_export and one.home == "cpu"}
    engines = [name for name, one in own.items() if one.exporting.artifact == "onnx"]  # programs take one picture
    installed = [name for name in engines if targets()[name].is_installed and not targets()[name].emulates]
    none = "none (pip extras onnx, openvino)"
    log.info("3. export for the engines that are installed: %s", ", ".join(installed) or none)
    best = {name: targets()[name].exporting.policies_for(int8.card.config)[0] for name in installed}
    artifacts = [export(int8, name, output / name, policy).file for name, policy in best.items()]

    log.info("4. four bits: calibrate, then train with the grid in place")
    policy = replace(load_policy("qdq").bits("*", 4), name=FOUR_BITS)
    four_bits = calibrate(ModelFile(trained), PictureSet(DIGITS), policy)
    four_bits.save_in(place := ensure_writable_dir(output / FOUR_BITS), world)
    start, fewer = ModelFile(str(four_bits.file)), min(epochs, FOUR_BIT_EPOCHS)
    tuned = finetune(start, digits, place, "digits_w4a4", policy, epochs=fewer, **how).load()

    log.info("5. score the float models, both INT8 modes, four bits and the engines on pictures apart from training")
    policies = {int8: ["ft-mode1", "ft-mode2"], four_bits: None, tuned: None}
    for one, chosen in policies.items():
        evaluate(one, val, chosen, batch_size=BATCH).save_in(output, world)
    if artifacts:
        evaluate(SubjectFiles(files=tuple(map(str, artifacts))), replace(val, batch=BATCH))

    files = map(card_path, [*(one.checkpoint for one in policies), *artifacts])
    cards = {file: RunCard.read(file) for file in files}
    unseen, content = open_pictures(DIGITS, "val"), BytesIO()  # a picture of a seven, for requests to the service
    unseen.read(list(unseen.labels).index(7)).save(content, "PNG")
    atomic_write_bytes(output / "seven.png", content.getvalue())
    try:
        write_page(output / "report.html", cards, val)
    except UsageError as error:
        log.info("no page: %s", error)
    places = [card_path(one) for one in artifacts]
    verdicts = [verdict for one in places if (verdict := card_verdict(cards[one], one, Path()))]
    fastest = min(verdicts, key=lambda verdict: verdict.ms or math.inf, default=None)
    results = tuple(result for card in cards.values() for result in card.measured())
    first, *_ = cards.values()
    return Evaluated(Evaluation(results, first, verdict=fastest, cards=tuple(cards.values())))
