import pytest
import torch
import torch.nn.functional as F

from swin_quant.train.parallel import Precision

CPU = torch.device("cpu")


def precision(level, half="bfloat16"):
    return Precision.choose(level, half, CPU)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_all_levels_compute_about_the_same_and_update_float32_weights_unless_all_are_half(tiny_model, kind, level):
    images = torch.randn(4, 3, 32, 32)
    exact = tiny_model(kind)(images)
    model = tiny_model(kind)
    logits = precision(level).logits(precision(level).network(model), images)
    assert logits.dtype == torch.float32
    signal, noise = exact.square().sum(), (logits - exact).square().sum()
    assert noise < 0.01 * signal and (noise == 0) == (level == "O0")
    F.cross_entropy(logits, torch.tensor([0, 1, 0, 1])).backward()
    expected = torch.bfloat16 if level == "O3" else torch.float32
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {expected}
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_batch_norms_count_what_they_see_in_half_networks_too(level):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    network = precision(level).network(model).train()
    precision(level).logits(network, 5 + torch.randn(8, 3, 6, 6)).square().mean().backward()
    assert model[1].running_mean.abs().min() > 0.01 and model[1].running_var.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_o1_keeps_norms_and_the_residual_stream_in_float32(tiny_model):
    model, types = tiny_model(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: types.update({name: output.dtype}))
    precision("O1").logits(model, torch.randn(2, 3, 32, 32))
    assert types["layers.0.blocks.0.norm1"] == types["layers.0"] == torch.float32
    assert types["layers.0.blocks.0.mlp.fc1"] == torch.bfloat16


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize(("level", "expected"), [("O2", torch.float32), ("O3", torch.bfloat16)])
def test_a_half_network_has_norms_of_float32_weights_unless_all_are_half(tiny_model, kind, level, expected):
    model, weights = tiny_model(kind), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(lambda m, x, y, name=name: weights.update({name: (m.weight.dtype, y.dtype)}))
    network = precision(level).network(model)
    precision(level).logits(network, torch.randn(2, 3, 32, 32))
    assert weights and set(weights.values()) == {(expected, torch.bfloat16)}
    precision(level).finish(model)
    assert model(torch.randn(2, 3, 32, 32)).dtype == torch.float32
    assert set(weights.values()) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_checkpointing_changes_no_gradient(tiny_model, kind, level):
    images, gradients = torch.randn(2, 3, 32, 32), []
    for checkpointing in (False, True):
        model = tiny_model(kind).train()
        for stage in model.layers:
            stage.checkpointing = checkpointing
        network = precision(level).network(model)
        torch.manual_seed(0)  # drop path
        precision(level).logits(network, images).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
