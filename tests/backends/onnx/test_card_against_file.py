"""A run card that was edited is refused where it contradicts the file, whose hash vouches for it alone."""

import json

import pytest

import swin_quant as sq

MEAN = [0.9, 0.9, 0.9]
EDITS = {
    "preprocess": lambda card: card["preprocess"].update(mean=MEAN),
    "artifact.precision": lambda card: card["artifact"].update(precision="float32"),
    **{
        f"artifact.options.{key}": lambda card, key=key, value=value: card["artifact"]["options"].update({key: value})
        for key, value in {"top_k": 3, "softmax": True, "uint8_input": True, "batch": 8}.items()
    },
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_model, tiny_config):
    folder = tmp_path_factory.mktemp("edited")
    how = sq.Preprocess.from_config(tiny_config())
    model = sq.Model(tiny_model(), "tiny", preprocess=how)
    images = [__import__("torch").randn(4, 3, how.size, how.size)]
    sq.calibrate(model, images, "qdq", passes=[])
    return sq.export(model, "onnx", folder).file


@pytest.mark.slow
@pytest.mark.parametrize("key", EDITS)
def test_an_edited_card_is_refused_by_its_key(exported, key):
    file = exported.with_suffix(".json")
    before = file.read_text()
    card = json.loads(before)
    EDITS[key](card)
    file.write_text(json.dumps(card))
    try:
        with pytest.raises(sq.SwinQuantError, match=key) as refusal:
            sq.artifact(exported)
        assert str(refusal.value).startswith(str(file)) and "\n" not in str(refusal.value)
    finally:
        file.write_text(before)
    assert sq.artifact(exported).file == exported
