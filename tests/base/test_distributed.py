"""A world of one, and sums over two processes; tests/cli/test_ranks.py has whole commands and failures."""

import math
import os
import time

import pytest
import torch

from swin_quant.base import watchdog
from swin_quant.base.distributed import World, all_sum, choose_device, from_main, gather, process_group
from swin_quant.base.errors import SwinQuantError, UsageError
from tests.helpers.refusals import refused

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def test_a_plain_start_is_a_world_of_one():
    with process_group("cpu") as world:
        assert world == World(0, 1, torch.device("cpu")) and world.is_main
        assert all_sum(torch.tensor([1.5, 2.0]), world.device).tolist() == [1.5, 2.0]
        assert gather(["a"]) == ["a"]


def test_two_ranks_add_and_gather_in_rank_order(ranks):
    def work(world):
        total = all_sum(torch.tensor([world.rank + 1.0, 10.0]), world.device)
        return world.size, world.is_main, total.tolist(), gather([world.rank] * (world.rank * 2 + 1))

    assert ranks(work) == [(2, True, [3.0, 20.0], [0, 1, 1, 1]), (2, False, [3.0, 20.0], [0, 1, 1, 1])]


def test_what_ranks_send_each_other_runs_nothing(ranks, monkeypatch):
    """Tensors, JSON and torch's reader of weights: never a pickle of anything else."""
    names = ["a", "\udcff\u00fc", 3, [1, ["b"]]]

    def work(world):
        state = {"weight": torch.arange(6.0).view(2, 3), "random": (3, (1, 2), None), "names": names}
        state = from_main(state if world.is_main else None)
        nothing = from_main(None)
        return gather(names if world.rank else []), state["weight"].sum().item(), state["random"], nothing

    monkeypatch.setattr("torch.distributed.distributed_c10d._object_to_tensor", None)
    assert ranks(work) == [(names, 15.0, (3, (1, 2), None), None)] * 2


def test_a_rank_that_is_slow_at_the_end_is_waited_for(ranks):
    assert ranks(lambda world: time.sleep(2 * world.rank)) == [None, None]


@pytest.mark.parametrize(
    ("late", "seconds", "times", "tick"),
    [
        (None, 0.0, 0, None),
        ("0", 0.5, math.inf, 0.1),  # the store answers the waiting rank late, as on a busy machine
        # between the failing rank's first question, when it has nothing to report, and the answer
        pytest.param("1", 1.0, 1, 0.3, marks=pytest.mark.nightly),
    ],
)
def test_the_first_reason_reaches_every_rank(ranks, monkeypatch, late, seconds, times, tick):
    check, asked = torch.distributed.PrefixStore.check, []

    def answer(store, keys):
        if os.environ["RANK"] == late and len(asked) < times:
            time.sleep(seconds)
        asked.append(keys)
        return check(store, keys)

    def work(world):
        if world.rank == 1:
            raise SwinQuantError("no picture\nleft")
        all_sum(torch.zeros(1), world.device)

    if late:
        monkeypatch.setattr(watchdog, "_TICK_SECONDS", tick)
        monkeypatch.setattr(torch.distributed.PrefixStore, "check", answer)
    assert ranks(work) == ["stopped, since rank 1 failed: no picture left", "no picture left"]


def test_devices(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    refused(lambda: choose_device("tpu"), "device tpu", kind=UsageError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    refused(lambda: choose_device("cuda"), "device cuda: no GPU is visible; use device cpu", kind=UsageError)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused(lambda: choose_device("cuda", 2), "rank 2 of this machine has no GPU, 2 are visible", kind=UsageError)
