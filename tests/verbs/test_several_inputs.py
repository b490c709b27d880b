"""A module with several inputs by name, from wrapping to an engine."""

import onnxruntime
import pytest
import torch
from torch import nn

import swin_quant as sq


class Grounded(nn.Module):
    """Words attend to a picture, in the manner of a grounded detector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.words, self.head = nn.Conv2d(3, 16, 4, 4), nn.Embedding(50, 16), nn.Linear(16, 5)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, pixel_values, input_ids, attention_mask=None):
        tokens, words = self.stem(pixel_values).flatten(2).transpose(1, 2), self.words(input_ids)
        tokens = tokens + self.cross(tokens, words, words, key_padding_mask=~attention_mask)[0]
        return {"logits": self.head(tokens.mean(1)), "boxes": self.head(tokens).sigmoid()}


@pytest.fixture(scope="module")
def batch():
    """In another order than the arguments."""
    torch.manual_seed(1)
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[3:, 5:] = False
    return {"input_ids": torch.randint(0, 50, (6, 7)), "attention_mask": mask, "pixel_values": torch.randn(6, 3, 16, 8)}


@pytest.fixture(scope="module")
def model(batch):
    return sq.calibrate(sq.wrap(Grounded(), batch, name="two", output=("logits", "boxes")), [batch], "qdq", passes=[])


def test_it_computes_what_the_module_does_and_is_quantized(model, batch):
    with torch.no_grad():
        wanted = Grounded().eval()(**batch)
    for ours, right in zip(model.module(model.module.inputs.pack(batch)), wanted.values(), strict=True):
        torch.testing.assert_close(ours, right)
    for key, found in model(batch).items():
        assert wanted[key].square().sum() > 300 * (found - wanted[key]).square().sum() > 0
    assert model.card.calibration["coverage"]["share"] == 1
    assert [score.sqnr_db > 25 for score in sq.evaluate(model, [batch], half="none").outputs] == [True] * 3


def test_it_is_saved_and_loaded_into_a_module_of_its_structure(model, batch, tmp_path):
    again = sq.load(model.save(tmp_path / "two_calib.pth"), Grounded())
    assert again.module.inputs == model.module.inputs
    assert all(torch.equal(one, again(batch)[key]) for key, one in model(batch).items())


@pytest.mark.slow
def test_it_runs_on_engines_by_the_names_of_its_inputs(model, batch, tmp_path):
    made = sq.export(model, "openvino", tmp_path)
    assert sq.verify(made, [batch])
    run, wanted = made.load(), model(batch)
    for part in (batch, {key: one[:1].numpy() for key, one in batch.items()}):
        for key, found in run(part).items():
            torch.testing.assert_close(found, wanted[key][: len(found)], rtol=0.02, atol=0.02)
    session = onnxruntime.InferenceSession(str(made.file), providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {key: one.numpy() for key, one in batch.items()})[0]
    torch.testing.assert_close(torch.from_numpy(found), wanted["logits"], rtol=0.02, atol=0.02)
    with pytest.raises(sq.UsageError, match="inputs lack input_ids: give"):
        run({key: one for key, one in batch.items() if key != "input_ids"})
    again = sq.artifact(made.file, Grounded())
    assert sq.verify(again, [batch]) and sq.export(again.origin, "openvino", tmp_path / "again")


def test_a_call_that_the_module_does_not_take_is_one_line(batch):
    with pytest.raises(sq.SwinQuantError, match=r"two: does not take inputs input_ids: .*'pixel_values'"):
        sq.wrap(Grounded(), {"input_ids": batch["input_ids"]}, name="two")
