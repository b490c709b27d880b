"""Parts that both versions share, the types of tensors, and whole models: as graphs, and without pictures."""

import pytest
import torch
import torch.nn.functional as F
from nightly import share
from torch import nn

from swin_quant.models.layers import LayerNorm, WindowBlock
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import enabled_nodes, quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.watch import watching

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
    softmax = torch.Tensor.softmax

    def look(name, module, inputs, y):
        if isinstance(module, WindowBlock):
            seen["residual"] |= {inputs[0].dtype, y.dtype}
        if isinstance(module, nn.LayerNorm):
            seen["norm"].add(y.dtype)

    def watched(self, *args, **kwargs):
        result = softmax(self, *args, **kwargs)
        seen["softmax"].add(result.dtype)
        return result

    with pytest.MonkeyPatch.context() as patch, watching(dict(model.named_modules()), look):
        patch.setattr(torch.Tensor, "softmax", watched)
        return seen, model(x)


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


@pytest.fixture(scope="module")
def quantized(tiny_model, use_policy):
    """make(kind, policy) -> a shallow quantized model: two stages, with shift, mask and merging."""

    def make(kind, policy):
        model = tiny_model(kind)
        calibrate(model, [torch.randn(2, 3, 32, 32)], Method("max"))
        use_policy(model, policy)
        quantize(model)
        return model

    return make


@pytest.mark.parametrize(("kind", "policy"), share([("swinv2", "ft-mode1"), ("swin", "qdq")], 2))
def test_export_serves_any_batch(kind, policy, quantized):
    model = quantized(kind, policy)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    ops = [str(node.target) for node in program.graph.nodes]
    assert sum("fake_quant" in op for op in ops) == len(enabled_nodes(model)) > 0
    exported = program.module()
    for size in (1, 3, 5):
        x = torch.randn(size, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(exported(x), model(x))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["swinv2", "swin"])
def test_compile_makes_one_graph(kind, quantized):
    torch._dynamo.reset()
    model = quantized(kind, "ft-mode1")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("policy", ["float", "qdq"])
@KINDS
def test_no_picture_gives_no_logits_and_zero_gradients(tiny_model, use_policy, kind, policy, checkpointing):
    model = tiny_model(kind, DROP_PATH_RATE=0.2)
    calibrate(model, [torch.randn(2, 3, 32, 32), torch.empty(0, 3, 32, 32)], Method("max"))
    use_policy(model, policy)
    for node in enabled_nodes(model).values():
        node.learn_range()
    quantize(model)
    for stage in model.layers:
        stage.checkpointing = checkpointing
    for mode in (model.train(), model.eval()):
        logits = mode(torch.empty(0, 3, 32, 32))
        assert logits.shape == (0, 10) and logits.dtype == torch.float32
        model.zero_grad()
        logits.sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
