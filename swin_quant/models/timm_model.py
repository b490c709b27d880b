"""Any image classifier of timm by its name there: built by timm, traced, and given nodes automatically.

Attention is built as the products that it is (timm's fused attention is off), and norms that hold an activation are
taken apart, so that every product can be reached.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from yacs.config import CfgNode

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import UsageError, listed
from swin_quant.config.timm import TIMM, options_of
from swin_quant.models.registry import Architecture
from swin_quant.models.traced import Traced, traced


def _build(cfg: CfgNode) -> Traced:
    timm = import_timm()
    name, options = cfg.MODEL.TIMM.ARCHITECTURE, options_of(cfg, "the configuration")
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.3)
        raise UsageError(f"MODEL.TIMM.ARCHITECTURE {name}: timm has no such model; it has {listed(close) or 'others'}")
    size = cfg.DATA.IMG_SIZE
    with _products_apart(timm):
        module = _made(timm, name, size, {**options, "num_classes": cfg.MODEL.NUM_CLASSES}, cfg)
    from timm.layers import BatchNormAct2d, DropPath
    from timm.models._features_fx import get_notrace_functions, get_notrace_modules

    notrace: Any = get_notrace_modules, get_notrace_functions  # timm gives them no types
    leaves = (BatchNormAct2d, DropPath, *notrace[0]())
    return traced(
        module,
        size,
        3,
        cfg.MODEL.NUM_CLASSES,
        what=name,
        leaves=leaves,
        whole=tuple(notrace[1]()),
        split=_activations_apart,
        stem=cfg.MODEL.TIMM.QUANTIZE_STEM,
    )


@contextmanager
def _products_apart(timm: Any) -> Iterator[None]:
    """timm builds attention of two products and a softmax inside."""
    fused = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(False)
    try:
        yield
    finally:
        timm.layers.set_fused_attn(bool(fused))


def _made(timm: Any, name: str, size: int, options: dict[str, Any], cfg: CfgNode) -> nn.Module:
    """What timm builds; of this size of pictures where it wants to know it. UsageError for what it refuses."""
    rates = {"drop_rate": cfg.MODEL.DROP_RATE, "drop_path_rate": cfg.MODEL.DROP_PATH_RATE}
    problem: Exception | None = None
    for more in ({"img_size": size, **rates}, rates, {"drop_rate": cfg.MODEL.DROP_RATE}, {}):
        try:
            module: nn.Module = timm.create_model(name, **{**more, **options})
            return module
        except TypeError as error:  # it takes no such option, or no such value
            problem = error
            if not any(f"'{key}'" in str(error) for key in more if key not in options):
                break
        except Exception as error:  # whatever the builders of a thousand models make of values
            problem = error
            break
    reason = (str(problem).splitlines() or [type(problem).__name__])[0][:200]
    raise UsageError(f"{name}: timm refuses MODEL.TIMM.OPTIONS {cfg.MODEL.TIMM.OPTIONS or '{}'}: {reason}") from problem


def _activations_apart(root: nn.Module, graph: fx.Graph) -> None:
    """Batch norms that hold dropout and activation become norms with those behind them, under the names they have."""
    for node in list(graph.nodes):
        norm = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, nn.BatchNorm2d) or type(norm) is nn.BatchNorm2d:
            continue
        name, last = str(node.target), node
        for below in ("drop", "act"):
            if not isinstance(getattr(norm, below, nn.Identity()), nn.Identity):
                with graph.inserting_after(last):
                    behind = graph.call_module(f"{name}.{below}")
                last.replace_all_uses_with(behind)
                behind.args = (last,)
                last = behind
        plain = nn.BatchNorm2d(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        plain.train(norm.training)
        for key, value in {**norm._parameters, **norm._buffers}.items():
            setattr(plain, key, value)
        for below, child in norm.named_children():
            plain.add_module(below, child)
        parent, _, own = name.rpartition(".")
        setattr(root.get_submodule(parent), own, plain)


ARCHITECTURE = Architecture(TIMM, _build, no_decay=("pos_embed", "cls_token", "dist_token", "relative_position_bias"))
