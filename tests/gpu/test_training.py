"""A QAT step on a GPU: a CPU's gradients, in every precision, compiled, within the counted memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from swin_quant.base.distributed import World
from swin_quant.quant.policy import enabled_nodes
from swin_quant.train.optim import make_optimizer
from swin_quant.train.parallel import Precision, check_compiler, parallel
from swin_quant.train.recipe import Optimizer, Recipe
from swin_quant.train.snapshot import random_states, set_random_states

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])
LABELS = torch.arange(16) % 10


@pytest.fixture
def learning(calibrated):
    """learning(kind, device, learned=True) -> a quantizing model in training, on the device."""

    def make(kind, device, learned=True):
        model = calibrated(kind).to(device)
        for node in enabled_nodes(model).values() if learned else ():
            node.learn_range()
        return model.train()

    return make


def gradients(model, network, images):
    model.zero_grad()
    loss = F.cross_entropy(network(images).float(), LABELS.to(images.device))
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in named if parameter.grad is not None}


def direction(ours, theirs):
    """The cosine between two gradients of all weights: ties rounded differently change single ones."""
    ours, theirs = (torch.cat([grad.double().flatten() for grad in grads.values()]) for grads in (ours, theirs))
    return F.cosine_similarity(ours, theirs, dim=0).item()


@KINDS
@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
def test_gradients_are_those_of_a_cpu(gpu, learning, images, kind, learned):
    found = []
    for device in (gpu, torch.device("cpu")):
        model = learning(kind, device, learned)
        found.append(gradients(model, model, images.to(device)))
    (loss, ours), (expected, theirs) = found
    assert ours.keys() == theirs.keys() and any(name.endswith("_amax") for name in ours) == learned
    cosine = direction(ours, theirs)
    print(f"{kind}: cosine {cosine:.6f}, loss {loss:.5f} and {expected:.5f}")
    assert loss == pytest.approx(expected, rel=2e-2) and cosine > 0.98


@pytest.mark.parametrize(("level", "half"), [("O0", "auto"), ("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16")])
def test_steps_in_every_precision_lower_the_loss(gpu, learning, images, level, half):
    if gpu.type == "cpu" and half == "float16":
        pytest.skip("loss scaling is for GPUs")
    model, precision = learning("swin", gpu, learned=False), Precision.choose(level, half, gpu)
    network, scaler = precision.network(model), precision.scaler()
    optimizer = make_optimizer(model, Optimizer(lr=3e-4), len(images))
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(precision.logits(network, images.to(gpu)), LABELS.to(gpu))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    print(f"{level} {half}: losses {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@KINDS
def test_a_compiled_step_has_the_gradients_of_an_eager_one(gpu, learning, images, kind, monkeypatch):
    """By Triton on a GPU; with the CPU instead it is traced but not compiled, which would take minutes."""
    recipe = Recipe(compile=True)
    if gpu.type == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check_compiler(recipe, gpu)
    model = learning(kind, gpu)
    (loss, eager), (same, traced) = (
        gradients(model, network, images.to(gpu)) for network in (model, parallel(model, model, recipe, World()))
    )
    assert loss == pytest.approx(same, rel=2e-2) and direction(eager, traced) > 0.98


@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
def test_what_a_forward_pass_keeps_is_what_was_counted(gpu, learning, images, learned, monkeypatch):
    if gpu.type == "cpu":
        pytest.skip("torch does not count a CPU's memory")
    model, images = learning("swin", gpu, learned), images.repeat(8, 1, 1, 1).to(gpu)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    counted = __import__("training").saved_bytes(model, lambda: model(images).sum())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(images).sum()
    kept = torch.cuda.memory_allocated() - before
    print(f"kept {kept / 2**20:.1f} MiB, counted {counted / 2**20:.1f}")
    assert loss.requires_grad and kept == pytest.approx(counted, rel=0.1)


def test_random_numbers_go_on_where_a_snapshot_stopped(gpu):
    states = random_states()
    drawn = torch.rand(5, device=gpu)
    set_random_states(states)
    assert torch.equal(torch.rand(5, device=gpu), drawn)
