"""Find the policy that keeps the loss within a budget at the least latency, by measuring both; writes it as YAML."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.arguments import checked
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import update
from swin_quant.cli import shared
from swin_quant.cli.output import print_verdicts, tell
from swin_quant.quant import SEARCHED_ON
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.search_options import Budget, SearchOptions

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import OpenedCheckpoint
    from swin_quant.data.picture_set import Source
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy
    from swin_quant.verbs.search_costs import Search

EXAMPLES = """examples:
  swin-quant search out/my_calib.pth --data-path imagenet --engine openvino --max-drop 0.1 --output out
  swin-quant search out/my_calib.pth --data-path data --engine onnxruntime --min-sqnr 35 --batch 8 --output out
  swin-quant export out/my_calib.pth --for openvino --policy out/my_auto_openvino.yaml --output out   (what it found)

No labels are needed: the drop is estimated from the float model's probabilities where the two disagree, on pictures
that did not choose, with two standard errors added, and doubled on training pictures, where a network is too sure.
Exit code 1 says that the budget cannot be met; the best policy that was found is written all the same."""

_LESS = 0.7  # share of the divergence of a choice that was refuted, which the next may have


@checked
def search(
    model: Model | str | Path,
    pictures: Source,
    engine: str = "openvino",
    folder: str | Path = "out",
    policy: str | Policy | None = None,
    *,
    budget: Budget = Budget(),
    batch: int = 1,
    threads: int | None = None,
    float_type: str | None = None,
    device: str = "cpu",
) -> Search:
    """Find the layers that must stay float for a budget, at the least latency, and apply the policy.

    Each layer is measured alone on pictures, and each group of alike layers on the engine. Layers stay float in the
    order of their error for each millisecond that int8 saves there: as few as keep the budget on a quarter of the
    pictures. The others confirm the choice; if they refute it, the next may have 0.7 of its divergence.

    Args:
        model: A calibrated model. One that is in no file yet is saved in `folder` first.
        pictures: They need no labels. From a place on disk 1,024 are drawn, unless it says how many, with its seed + 1:
            another draw than the one that calibrates. On training pictures the drop counts twice.
        engine: An engine whose latency is measured on `device`.
        folder: The folder for the policy, <NAME>_auto_<ENGINE>.yaml.
        policy: The policy whose layers are switched. None: the engine's best.
        budget: Limits; without one of the loss, 0.1 points of top-1.
        batch: Pictures of a batch that is timed.
        threads: Threads of the engine. None: its own choice.
        float_type: Type of layers that are not int8.
        device: "cpu" or "cuda", where losses are measured.

    Returns:
        The policy with all measurements. The model gets it, or keeps its own, with a warning, where no policy keeps the
        budget; its card has the measurements.

    Raises:
        UsageError: the model is not calibrated, gives no logits, or the engine cannot be timed here.
    """
    from swin_quant.checkpoint.ranges import check_bits
    from swin_quant.config.outputs import need_logits
    from swin_quant.data.picture_set import source_of
    from swin_quant.exported import model_of
    from swin_quant.quant.policy import apply_policy
    from swin_quant.verbs import search_costs as costs
    from swin_quant.verbs.export import file_of, refuse_changed
    from swin_quant.verbs.sensitivity import read_sample

    model, source, budget = model_of(model), source_of(pictures), budget.or_default
    need_logits(model.network.output_kind, "search")
    model.need_calibrated()
    refuse_changed(model)
    options = EngineOptions(threads=threads, float_type=float_type, device=device)
    timer = costs.Timer(model, engine, policy, batch, options)
    check_bits(model.module, model.card, [timer.base], model.name)
    sample = read_sample(model, source, SEARCHED_ON)
    budget.tell_if_few(sum(map(len, sample.batches)))
    model.file = file_of(model, ensure_writable_dir(folder))
    losses = costs.Losses(model, timer.base, device, sample)
    layers = costs.in_order(costs.measure_layers(timer, losses))
    choose = cache(lambda count: losses.choose(costs.without(timer.base, layers[:count])))
    count, most_kl = sum(layer.saved_ms < 0 for layer in layers), math.inf
    while True:
        few_enough = partial(lambda most, count: choose(count).kl <= most and budget.allows(choose(count)), most_kl)
        count = bisect_left(range(len(layers)), True, lo=count, key=few_enough)
        loss = losses.confirm(costs.without(timer.base, layers[:count]))
        if budget.allows(loss) or count == len(layers):
            break
        log.info("%d layers in float: refuted by the pictures that confirm: %s", count, loss.figures)
        count, most_kl = count + 1, _LESS * choose(count).kl
    found = costs.write_found(timer, losses, layers[:count], loss, budget, folder)
    model.card = model.card.with_search(found.record)
    if found:
        apply_policy(model.module, found.policy)
        model.card = replace(model.card, policy=found.policy.to_dict())
    else:
        log.warning("%s; the model keeps its policy", found.unmet)
    return found


def run(options: SearchOptions, world: World) -> None:
    from swin_quant.checkpoint import open_checkpoint
    from swin_quant.report.nodes import search_data

    shared.one_process(world, "search")
    if not options.checkpoint:
        raise UsageError("nothing to search for: name a calibrated checkpoint")
    checkpoint = open_checkpoint(options.checkpoint)
    cfg = shared.config_of(checkpoint, options.model, options.data, options.run, OUTPUT=options.output)
    found = search_checkpoint(options, checkpoint, cfg, world)

    def show() -> None:
        found.show()
        print_verdicts([found.verdict])

    tell(options.json, show, search_data(found.record, found.file) | {"verdicts": [found.verdict.to_dict()]})
    if not found:
        raise SwinQuantError(found.unmet)


def search_checkpoint(options: SearchOptions, checkpoint: OpenedCheckpoint, cfg: CfgNode, world: World) -> Search:
    """Search as the options say; the checkpoint's run card, if there is one, gets the measurements."""
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.loading import load_for_scoring

    policy, data = options.policy.one(), options.data
    named = [policy] if policy and not checkpoint.card else []
    model, _ = load_for_scoring(cfg, checkpoint, named, world, any_bits=True)
    before = model.card
    count = None if data.pictures == SEARCHED_ON else data.pictures  # fewer, where there are no more
    how = {"count": count, "max_unreadable": data.max_unreadable, "cache_mode": "no", "batch": None}
    found = search(
        model,
        PictureSet.of_config(cfg, data.split, **how),
        options.engine,
        shared.output_dir(options.output, cfg),
        policy,
        budget=options.budget,
        batch=1 if data.batch is None else data.batch,
        device=world.device.type,
        **asdict(options.timing),
    )
    if model.card_file:
        update(model.card_file, before, lambda card: card.with_search(found.record))
    return found
