"""A long pass's stored parts: found again for the same key, and for no other."""

import torch

from swin_quant.quant.passes.scratch import Scratch, compute_key

CPU = torch.device("cpu")


def test_kept_values_are_read_back_exactly(tmp_path):
    scratch = Scratch(tmp_path / "folder")
    values = {"weight": torch.randn(3, 2), "gain": torch.tensor(float("nan"))}
    assert scratch.known("key", values, CPU) is None
    scratch.keep("key", values)
    found = scratch.known("key", values, CPU)
    assert torch.equal(found["weight"], values["weight"]) and found["gain"].isnan()
    assert scratch.known("other", values, CPU) is None
    scratch.clear()
    assert not (tmp_path / "folder").exists()


def test_without_a_folder_nothing_is_kept_and_other_ranks_write_nothing(tmp_path):
    for scratch in (Scratch(), Scratch(tmp_path / "folder", writes=False)):
        scratch.keep("key", {"weight": torch.ones(2)})
        scratch.clear()
        assert scratch.known("key", ["weight"], CPU) is None
    assert not (tmp_path / "folder").exists()


def test_a_damaged_file_and_one_of_other_names_are_no_use_and_it_is_said(tmp_path, caplog):
    scratch, values = Scratch(tmp_path), {"weight": torch.randn(3, 2)}
    scratch.keep("key", values)
    assert scratch.known("key", ["weight", "bias"], CPU) is None
    file = tmp_path / "key.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert scratch.known("key", values, CPU) is None
    assert len(caplog.records) == 2 and all("done anew" in record.message for record in caplog.records)


def test_the_key_is_of_weights_ranges_settings_pictures_and_options(tiny_model, use_policy):
    images = [torch.zeros(1, 3, 8, 8)]
    keys = set()
    for change in (
        lambda model: None,
        lambda model: model.head.bias.data.add_(1),
        lambda model: use_policy(model, "qdq"),
        lambda model: setattr(model.layers[0].blocks[0].mlp.fc1._input_quantizer, "amax", 2.0),
    ):
        model = tiny_model("swin")
        change(model)
        keys.add(compute_key([model], images, ["pass", {"seed": 0}]))
    model = tiny_model("swin")
    keys.add(compute_key([model], images, ["pass", {"seed": 1}]))
    keys.add(compute_key([model], [torch.ones(1, 3, 8, 8)], ["pass", {"seed": 0}]))
    assert len(keys) == 6
    assert compute_key([tiny_model("swin")], images, ["pass", {"seed": 0}]) in keys
