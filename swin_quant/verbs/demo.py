"""Train a micro Swin on digits, calibrate it, train it at 4 bits, score all on the engines. Offline, under 90 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from swin_quant.backends.registry import targets
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import show_cards
from swin_quant.cli.shared import one_process
from swin_quant.config import find_config, load_config
from swin_quant.train.recipe import load_recipe

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy

EXAMPLES = """examples:
  swin-quant demo
  swin-quant demo --model swinv2_digits --output out/demo2"""
PICTURES = 160  # on the page
FOUR_BITS, FOUR_BIT_EPOCHS = "w4a4", 2


@dataclass(frozen=True)
class DemoOptions:
    """The model to train, for how long, and the folder for everything."""

    output: Annotated[str, Flag("folder of everything", "DIR")] = "out/demo"
    model: Annotated[Literal["swin_digits", "swinv2_digits"], Flag("which micro Swin")] = "swin_digits"
    epochs: Annotated[int, Flag("epochs of the float training", "N", least=1)] = 6


def run(options: DemoOptions, world: World) -> None:
    one_process(world, "the demo")
    show_cards(run_demo(options, world))


def run_demo(options: DemoOptions, world: World) -> list[RunCard]:
    """Train, calibrate, finetune, export and score a micro Swin; returns the cards with the results."""
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.data.sources import DIGITS
    from swin_quant.loading import load_for_scoring
    from swin_quant.quant.policy import load_policy
    from swin_quant.train.run import Request
    from swin_quant.verbs.calibrate import calibrate_checkpoint
    from swin_quant.verbs.calibration_result import CalibrationPlan
    from swin_quant.verbs.evaluate_artifacts import Scoring, score_artifacts, write_cards
    from swin_quant.verbs.export import export_checkpoint
    from swin_quant.verbs.report_page import write_page
    from swin_quant.verbs.train import train_float

    library("sklearn.datasets", "demo")  # the digits: named before anything is trained
    output, epochs = ensure_writable_dir(options.output), options.epochs
    cfg = load_config(find_config(options.model), overrides={"DATA.DATA_PATH": DIGITS, "DATA.BATCH_SIZE": 64})

    log.info("1. train %s in float for %d epochs", cfg.MODEL.NAME, epochs)
    recipe = load_recipe("digits").having({"epochs": epochs}, "<epochs>")
    trained = train_float(cfg, recipe, Request(output, overwrite=True), world)

    log.info("2. calibrate on 10 x 8 pictures")
    policies = [load_policy(name) for name in ("ft-mode1", "ft-mode2")]
    done = calibrate_checkpoint(cfg, str(trained.checkpoint), policies[0], CalibrationPlan(), output, world)

    engines = [name for name, backend in targets().items() if backend.runs_its_export and backend.home == "cpu"]
    installed = [name for name in engines if targets()[name].is_installed and not targets()[name].emulates]
    listed = ", ".join(installed) or "none (pip extras onnx, openvino)"
    log.info("3. export for the engines that are installed: %s", listed)
    artifacts = [export_checkpoint(done.checkpoint, name, ensure_writable_dir(output / name))[0] for name in installed]

    log.info("4. four bits: calibrate, then train with the grid in place")
    four_bits = _train_four_bits(cfg, trained.checkpoint, output / FOUR_BITS, min(epochs, FOUR_BIT_EPOCHS), world)

    log.info("5. score float32, bfloat16, both INT8 modes, four bits and the engines on pictures apart from training")
    cards = {card_path(done.checkpoint): _score(done, cfg, policies, world)}
    for file in four_bits:
        model, own = load_for_scoring(cfg, str(file), [], world)
        cards[card_path(file)] = _score(model, cfg, own, world)
    scored = score_artifacts(artifacts, Scoring(overrides={"DATA.DATA_PATH": DIGITS}), world)
    write_cards(scored)
    cards |= {card_path(one.file): one.card for one in scored}

    atomic_write_bytes(output / "seven.png", _digit(7))
    try:
        write_page(output / "report.html", cards, PictureSet(DIGITS, "val"), PICTURES)
    except UsageError as error:
        log.info("no page: %s", error)
    return list(cards.values())


def _digit(wanted: int) -> bytes:
    """A picture of that digit, which training never saw, for requests to the service."""
    from swin_quant.data.sources import DIGITS, open_pictures

    pictures, file = open_pictures(DIGITS, "val"), BytesIO()
    pictures.read(list(pictures.labels).index(wanted)).save(file, "PNG")
    return file.getvalue()


def _train_four_bits(cfg: CfgNode, checkpoint: Path, folder: Path, epochs: int, world: World) -> list[Path]:
    """The calibrated and the trained checkpoint at W4A4."""
    from swin_quant.quant.policy import load_policy
    from swin_quant.train.run import Request
    from swin_quant.verbs.calibrate import calibrate_checkpoint
    from swin_quant.verbs.calibration_result import CalibrationPlan
    from swin_quant.verbs.finetune import train_quantized

    policy = replace(load_policy("qdq").bits("*", 4), name=FOUR_BITS)
    done = calibrate_checkpoint(cfg, str(checkpoint), policy, CalibrationPlan(), ensure_writable_dir(folder), world)
    start = Request(folder, start=str(done.checkpoint), overwrite=True)
    tuned = train_quantized(
        cfg, load_recipe("digits_w4a4").having({"epochs": epochs}, "<epochs>"), start, [policy], world
    )
    return [done.checkpoint, tuned.checkpoint]


def _score(model: Model, cfg: CfgNode, policies: Sequence[Policy], world: World) -> RunCard:
    """The card of a calibrated checkpoint with its results, written beside it."""
    from swin_quant.loading import baseline_of
    from swin_quant.verbs.evaluate import score_model, scored_on

    score_model(model, scored_on(cfg, model), policies, world, baseline=baseline_of(model, policies, world))
    model.card.write(card_path(model.checkpoint))
    return model.card
