"""A node sees a picture as if it ran alone on one thread, also on a machine with another order of sums."""

import logging

import pytest
import torch
from torch import nn

from swin_quant.quant.calibration import Method, observe
from swin_quant.quant.quantizer import Quantizer, Role

ULP = 2.0**-23


class Careless(nn.Module):
    """A network whose last bits depend on what they must not: on `whose` of the pictures, in a batch or on threads."""

    def __init__(self, error):
        super().__init__()
        self.layer, self.node, self.error = nn.Linear(4, 4), Quantizer(Role.GEMM_INPUT), error
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.node(x * (1 + ULP * self.error(len(x))))


def nothing(size):
    return torch.zeros(size, 1)


def of_batches(size):
    return torch.full((size, 1), float(size > 1))


def of_the_last(size):
    return torch.arange(size)[:, None].eq(size - 1) * float(size > 1)


def of_threads(size):
    return torch.full((size, 1), torch.get_num_threads() - 1.0)


@pytest.fixture(autouse=True)
def threads():
    """threads(number) sets the number, one at first; it is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def found(model, images, *sizes):
    calibration = observe(model, images.split(sizes), Method())
    return calibration.largest["node"], calibration.statistics["node"].counts.tolist()


@pytest.mark.parametrize("error", [nothing, of_batches, of_the_last, of_threads])
def test_statistics_are_those_of_pictures_alone_on_one_thread(error, threads):
    threads(2)
    model, images = Careless(error), torch.rand(7, 4)
    seen = [found(model, images, *sizes) for sizes in ([7], [1] * 7, [3, 3, 1], [2, 5])]
    assert all(one == seen[0] for one in seen)
    assert seen[0] == found(Careless(nothing), images, 7) and sum(seen[0][1]) == images.numel()


def test_batches_run_together_where_that_changes_nothing():
    model = Careless(nothing)
    found(model, torch.rand(20, 4), 6, 6, 6, 2)
    assert model.sizes == [6, 1, 1, 6, 6, 6, 2, 1, 1, 2]  # each new size is tried, its ends alone


def test_models_that_mix_pictures_run_one_by_one_with_one_message(caplog):
    model = Careless(of_batches)
    with caplog.at_level(logging.DEBUG, "swin_quant"):
        found(model, torch.rand(10, 4), 3, 3, 2, 2)
    assert model.sizes[3:] == [1] * 3 + [1] * 3 + [2, 1, 1] + [1] * 4 and model.sizes[:3] == [3, 1, 1]
    assert caplog.text.count("one picture at a time") == 1


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_threads_change_no_count_of_a_model(kind, tiny_model, threads):
    model, images = tiny_model(kind), torch.randn(3, 3, 32, 32)
    one = observe(model, images.split(1))
    threads(2)
    two = observe(model, [images])
    assert two.largest == one.largest
    for name, statistics in one.statistics.items():
        assert two.statistics[name].counts.tolist() == statistics.counts.tolist(), name
