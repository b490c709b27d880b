"""Parts that both versions share, and the types of tensors in a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.base.compat import import_timm
from swin_quant.models.layers import DropPath, LayerNorm
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import quantize
from swin_quant.quant.quantizer import named_nodes

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])


def test_layer_norm_computes_in_float32_and_answers_in_the_type_of_its_parameters():
    x = 300 + torch.randn(4, 64)
    norm = LayerNorm(64)
    nn.init.normal_(norm.weight)
    exact = F.layer_norm(x.bfloat16().float(), (64,), norm.weight, norm.bias)
    assert torch.equal(norm(x.bfloat16()), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x), F.layer_norm(x, (64,), norm.weight, norm.bias))
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def types_seen(model, x):
    """Types of blocks' inputs and outputs, LayerNorms' outputs, and softmax's inputs."""
    seen = {"residual": set(), "norm": set(), "softmax": set()}

    def note(where, pick):
        return lambda module, inputs, output: seen[where].add(pick(inputs, output).dtype)

    hooks = []
    for name, module in model.named_modules():
        if ".blocks." in name and name.split(".")[-2] == "blocks":
            hooks += [module.register_forward_hook(note("residual", lambda i, o: o))]
            hooks += [module.register_forward_hook(note("residual", lambda i, o: i[0]))]
        if isinstance(module, nn.LayerNorm):
            hooks += [module.register_forward_hook(note("norm", lambda i, o: o))]
    softmax = torch.Tensor.softmax

    def watched(self, *args, **kwargs):
        result = softmax(self, *args, **kwargs)
        seen["softmax"].add(result.dtype)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", watched)
        logits = model(x)
    for hook in hooks:
        hook.remove()
    return seen, logits


@KINDS
@pytest.mark.parametrize("patch_norm", [True, False])
@torch.no_grad()
def test_residuals_norms_and_softmax_stay_float32_under_autocast(kind, patch_norm, tiny_model):
    model = tiny_model(kind, PATCH_NORM=patch_norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen, logits = types_seen(model, torch.randn(2, 3, 32, 32))
    assert seen == {where: {torch.float32} for where in seen}
    assert logits.dtype == torch.bfloat16  # autocast was active


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["autocast", "cast"])
@torch.no_grad()
def test_lower_precision_is_close_with_nodes_off_and_on(kind, dtype, how, tiny_model, use_policy):
    model = tiny_model(kind)
    x = torch.randn(4, 3, 32, 32)
    calibrate(model, [x], Method("max"))
    use_policy(model, "ft-mode1")
    for switch in (lambda model: None, quantize):
        switch(model)
        exact = model.float()(x)
        if how == "autocast":
            with torch.autocast("cpu", dtype=dtype):
                logits = model(x)
        else:
            logits = model.to(dtype)(x.to(dtype))
            assert {node.amax.dtype for node in named_nodes(model).values()} == {torch.float32}
        assert logits.dtype == dtype
        assert (logits.float() - exact).norm() < 0.1 * exact.norm()


def test_drop_path_draws_what_timm_s_draws():
    x = torch.randn(64, 3, 5)
    ours, theirs = DropPath(0.4), import_timm().layers.DropPath(0.4)
    torch.manual_seed(1)
    dropped = ours(x)
    torch.manual_seed(1)
    assert torch.equal(dropped, theirs(x)) and 10 < sum(bool(row.any()) for row in dropped) < 60
    assert ours.eval()(x) is x and DropPath(0.0)(x) is x
