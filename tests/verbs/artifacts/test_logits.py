"""swin-quant predict --logits: names, logits and top-1 of an artifact, as other programs read them."""

import numpy as np
import pytest


@pytest.fixture
def logits(run, tmp_path):
    """logits(artifact and flags ...) -> the arrays that were written."""

    def go(*words):
        run("predict", *words, "--logits", tmp_path / "out").ok()
        (written,) = (tmp_path / "out").glob("*_logits.npz")
        return dict(np.load(written))  # allow_pickle is off

    return go


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_logits_against_arithmetic(logits, hand_made, pictures, arithmetic, engine):
    arrays = logits(hand_made, "--engine", engine, "--data-path", pictures, "--batch", 2)
    files = sorted((pictures / "val").rglob("*.png"))
    assert arrays["names"].tolist() == [file.relative_to(pictures / "val").as_posix() for file in files]
    assert arrays["logits"].dtype == np.float32 and arrays["logits"].shape == (7, 3)
    np.testing.assert_allclose(arrays["logits"], [arithmetic(file) for file in files], atol=1e-5)
    assert (arrays["top1"] == arrays["logits"].argmax(1)).all()
    assert arrays["labels"].tolist() == [("cat", "dog", "fox").index(file.parent.name) for file in files]


def test_one_engine_does_without_being_named(logits, hand_made, own_pictures):
    files = sorted(own_pictures.rglob("*.png"))
    files[1].write_bytes(b"broken")
    arrays = logits(hand_made, *files[:4], "--max-unreadable", 0.5)
    assert arrays["names"].tolist() == [str(file) for file in (files[0], *files[2:4])]
    assert arrays["labels"].tolist() == [-1, -1, -1]


def test_unwritable_folders_are_refused(run, hand_made, pictures, tmp_path):
    words = ("predict", hand_made, "--data-path", pictures, "--logits")
    (tmp_path / "file").write_text("")
    assert "cannot be the output directory" in run(*words, tmp_path / "file").error(1)
    assert (tmp_path / "file").read_text() == ""
