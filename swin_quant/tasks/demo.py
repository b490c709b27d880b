"""The demo: everything from training to the accuracy-delta table on scikit-learn's handwritten digits, offline."""

from pathlib import Path

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.config import find_config, load_config
from swin_quant.data.sources import DIGITS
from swin_quant.quant.policies import load_policy
from swin_quant.tasks.calibrate import CalibrationPlan, calibrate_checkpoint
from swin_quant.tasks.evaluate import score_model
from swin_quant.tasks.page import pictures_at, write_page
from swin_quant.tasks.train import Request, train_float
from swin_quant.train.recipes import load_recipe

PICTURES = 360  # that the page looks at: all of val


def run_demo(output: str | Path, config: str = "swin_digits", epochs: int = 8, world: World = World()) -> RunCard:  # noqa: B008
    """Train, calibrate and score a micro Swin; files go to `output`. Returns the card, results included."""
    output = ensure_writable_dir(output)
    cfg = load_config(find_config(config), overrides={"DATA.DATA_PATH": DIGITS, "DATA.BATCH_SIZE": 64})

    log.info("1. train %s in float for %d epochs", cfg.MODEL.NAME, epochs)
    recipe = load_recipe("digits").having({"epochs": epochs}, "<epochs>")
    trained = train_float(cfg, recipe, Request(output, overwrite=True), world)

    log.info("2. calibrate on 10 x 8 pictures")
    policies = [load_policy(name) for name in ("ft-mode1", "ft-mode2")]
    done = calibrate_checkpoint(cfg, str(trained.checkpoint), policies[0], CalibrationPlan(), output, world)

    log.info("3. score float32, bfloat16 and both INT8 modes on pictures that training never saw")
    card = score_model(done.model, cfg, done.card, policies, world)
    file = done.checkpoint.with_suffix(".json")
    card.write(file)
    try:
        write_page(output / "report.html", {file: card}, pictures_at(DIGITS, "val", zip_mode=False), PICTURES)
    except UsageError as error:
        log.info("no page: %s", error)
    return card
