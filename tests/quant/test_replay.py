"""A network from the middle on gives the whole network's results, and computes nothing before."""

import torch

from swin_quant.models.registry import blocks_of
from swin_quant.quant.sensitivity import recorded, replayed


def test_the_rest_from_every_block_on_is_the_whole(tiny_model):
    model, images = tiny_model(), torch.randn(3, 3, 32, 32)
    blocks = list(blocks_of(model).values())
    calls = []
    for number, block in enumerate(blocks):
        block.attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    with torch.inference_mode():
        with recorded(blocks) as outputs:
            expected = model(images)
        for begin in range(len(blocks) + 1):
            calls.clear()
            with replayed(blocks, outputs[:begin]):
                assert torch.equal(model(images), expected)
            assert calls == list(range(begin, len(blocks)))
        changed = [output + 1 for output in outputs[:1]]
        with replayed(blocks, changed):
            assert not torch.equal(model(images), expected)
        assert torch.equal(model(images), expected)
    assert all("forward" not in vars(block) for block in blocks)
