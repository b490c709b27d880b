"""Find the policy that keeps the loss within a budget at the least latency, by measuring both; writes it as YAML."""

import math
from bisect import bisect_left
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import update
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.config.outputs import need_logits
from swin_quant.data.picture_set import PictureSet, Source
from swin_quant.exported import open_model
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant import SEARCHED_ON
from swin_quant.quant.policy import apply_policy
from swin_quant.report.nodes import Search
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export import ensure_saved, refuse_changed
from swin_quant.verbs.search_costs import Budget, Losses, in_order, measure_layers, without, write_found
from swin_quant.verbs.sensitivity import read_sample
from swin_quant.verbs.timing import Timer

EXAMPLES = """swin-quant search out/my_calib.pth --data-path imagenet --engine openvino --max-drop 0.1 --output out
swin-quant search out/my_calib.pth --data-path data --engine onnxruntime --min-sqnr 35 --batch 8 --output out
swin-quant export out/my_calib.pth --for openvino --policy out/my_auto_openvino.yaml --output out"""

_LESS = 0.7  # share of the divergence of a choice that was refuted, which the next may have


@checked
def search(
    model: Annotated[Model | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures", without=("batch",))] = None,
    engine: str = "openvino",
    folder: Annotated[str | Path, Parameter(name="--output")] = "out",
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: whose layers are switched")] = None,
    *,
    budget: Annotated[Budget, Fields(Budget, "budget")] = Budget(),
    batch: int = 1,
    threads: int | None = None,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
) -> Search:
    """Find the fastest mixed policy that keeps a limit of the loss: which layers stay float, and which become int8.

    The error of each layer is measured on pictures, and its time on the engine. As few layers as possible stay float,
    those first whose error is large for the time that int8 saves. No labels are needed: the drop of accuracy is
    estimated, with a margin, from pictures that float and int8 classify differently. The policy is written as YAML for
    `export --policy`; exit code 1 says that no policy keeps the limit, and the best one is written all the same.

    Args:
        model: A calibrated model or checkpoint. A model that is in no file yet is saved in the folder first.
        pictures: From a place on disk 1,024 are drawn, unless it says how many, with its seed + 1: another draw than
            the one that calibrates.
        engine: engine that will run the model, on which layers are timed
        folder: folder for the policy, NAME_auto_ENGINE.yaml
        policy: Default: the engine's best.
        budget: Limits; without one of the loss, 0.1 points of top-1.
        batch: batch size that is timed
        threads: threads of the engine (default: the engine chooses)
        float_type: type of float layers (default float32; GPUs float16)

    Returns:
        The policy with all measurements; false where the budget cannot be met. The model gets it, or keeps its own,
        with a warning; its card has the measurements.

    Raises:
        UsageError: The model is not calibrated, gives no logits, or the engine cannot be timed here.
    """
    one_process("search")
    asked, budget, file = one_policy(policy), budget.or_default, model if isinstance(model, ModelFile) else None
    if file:
        card = file.need_checkpoint().card
        model = file.load([asked] if asked and not card else [], any_bits=True)
    model, before = open_model(model), open_model(model).card
    device = model.device.type
    need_logits(model.network.output_kind, "search")
    model.need_calibrated()
    refuse_changed(model)
    options = EngineOptions(threads=threads, float_type=float_type, device=device)
    timer = Timer(model, engine, asked, batch, options)
    check_bits(model.module, model.card, [timer.base], model.name)
    sample = read_sample(model, pictures, SEARCHED_ON)
    budget.tell_if_few(sum(map(len, sample.batches)))
    model.file = ensure_saved(model, ensure_writable_dir(folder))
    losses = Losses(model, timer.base, device, sample)
    layers = in_order(measure_layers(timer, losses))
    choose = cache(lambda count: losses.choose(without(timer.base, layers[:count])))
    count, most_kl = sum(layer.saved_ms < 0 for layer in layers), math.inf
    while True:
        few_enough = partial(lambda most, count: choose(count).kl <= most and budget.allows(choose(count)), most_kl)
        count = bisect_left(range(len(layers)), True, lo=count, key=few_enough)
        loss = losses.confirm(without(timer.base, layers[:count]))
        if budget.allows(loss) or count == len(layers):
            break
        log.info("%d layers in float: refuted by the pictures that confirm: %s", count, loss.figures)
        count, most_kl = count + 1, _LESS * choose(count).kl
    found = write_found(timer, losses, layers[:count], loss, budget, folder)
    model.card = model.card.with_search(found.record)
    if file and model.card_file:
        update(model.card_file, before, lambda now: now.with_search(found.record))
    if found:
        apply_policy(model.module, found.policy)
        model.card = replace(model.card, policy=found.policy.to_dict())
    else:
        log.warning("%s; the model keeps its policy", found.unmet)
    return found
