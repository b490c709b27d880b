"""NCCL with a single rank, all that one GPU allows: sums, DDP and FSDP2 as in a training."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from swin_quant.base.distributed import World, all_sum
from swin_quant.quant.quantizer import State, named_nodes
from swin_quant.train import parallel
from swin_quant.train.parallel import full_states, is_sharded, load_full_states
from swin_quant.train.recipe import Memory, Optimizer, Recipe

LABELS = torch.arange(16) % 10


@pytest.fixture
def group(gpu):
    """A process group of only this process, opened as `process_group` does."""
    backend = "cpu:gloo,cuda:nccl" if gpu.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, gpu)
    dist.destroy_process_group()


def test_a_sum_over_ranks(group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)  # otherwise it would return at once
    assert all_sum(torch.tensor([1.5, 2.0]), group.device).tolist() == [1.5, 2.0]


@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_a_step_is_that_of_one_process(group, calibrated, images, fsdp):
    recipe = Recipe(memory=Memory(fsdp=fsdp))
    alone, together = calibrated("swin").to(group.device), calibrated("swin").to(group.device)
    two = World(0, 2, group.device)  # a single rank's model would not be wrapped
    network = parallel._sharded(together, recipe, group) if fsdp else parallel.parallel(together, together, recipe, two)
    assert is_sharded(together) == fsdp
    weights = []
    for model, net in ((alone, alone), (together, network)):
        optimizer = torch.optim.AdamW(model.train().parameters(), Optimizer().lr)
        F.cross_entropy(net(images.to(group.device)).float(), LABELS.to(group.device)).backward()
        optimizer.step()
        states = full_states(model, optimizer)
        weights.append({key: value.cpu() for key, value in states[0].items()})
        load_full_states(model, optimizer, states)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-3)
    assert all(node.state is State.QUANTIZE for node in named_nodes(together).values() if node.setting.enabled)
