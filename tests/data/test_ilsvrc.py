"""The flat validation folder with each kind of label file; all give the same labels."""

import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.sources import open_pictures
from tests.helpers.refusals import refused

LABELS = [5, 999, 5, 0, 321, 700]  # indices into the sorted wnids


@pytest.fixture
def flat(tmp_path, files):
    root = tmp_path / "ilsvrc"
    (root / "val").mkdir(parents=True)
    for number, data in enumerate(files.values(), 1):
        (root / "val" / f"ILSVRC2012_val_{number:08d}.JPEG").write_bytes(data)
    return root


def devkit_order(imagenet):
    """An order of its own, unsorted as the devkit's ILSVRC2012_IDs."""
    return imagenet[500:] + imagenet[:500][::-1]


def write(root, form, imagenet):
    wnids = [imagenet[label] for label in LABELS]
    names = [f"ILSVRC2012_val_{number:08d}" for number in range(1, 7)]
    if form == "val.txt":
        text = [f"{name}.JPEG {label}" for name, label in zip(names, LABELS, strict=True)][::-1]
    elif form == "LOC_val_solution.csv":
        text = ["ImageId,PredictionString"] + [f"{n},{w} 1 2 3 4 " for n, w in zip(names, wnids, strict=True)]
    elif form == "imagenet_2012_validation_synset_labels.txt":
        text = wnids
    else:
        text = [str(devkit_order(imagenet).index(wnid) + 1) for wnid in wnids]
    (root / form).parent.mkdir(exist_ok=True, parents=True)
    (root / form).write_text("\n".join(text) + "\n")


def clsloc(root, imagenet):
    lines = [f"{wnid} {number} some_name" for number, wnid in enumerate(devkit_order(imagenet), 1)]
    (root / "map_clsloc.txt").write_text("\n".join(lines))


TRUTH = "ILSVRC2012_validation_ground_truth.txt"


@pytest.mark.parametrize(
    "form", ["val.txt", "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt", TRUTH]
)
def test_every_form_of_labels_gives_places_in_the_sorted_wnids(flat, alike, imagenet, form):
    write(flat, form, imagenet)
    if form == TRUTH:
        clsloc(flat, imagenet)
    for place in (str(flat), f"ilsvrc:{flat}", str(flat / "val") if form != TRUTH else str(flat)):
        if place == str(flat / "val"):
            (flat / form).rename(flat / "val" / form)  # all in one folder
        pictures = open_pictures(place, "val", num_classes=1000)
        alike(pictures, labels=False)
        assert pictures.labels == LABELS and pictures.class_names == imagenet


def test_the_devkits_own_table_translates_its_ids(flat, imagenet):
    io = pytest.importorskip("scipy.io")
    data = flat / "ILSVRC2012_devkit_t12" / "data"
    write(data, TRUTH, imagenet)
    ids = "numbers classes by the devkit's ids, not by sorted wnids: put the devkit"
    refused(lambda: open_pictures(str(flat), "val", num_classes=1000), ids)
    import numpy as np

    rows = [(number, wnid, "words") for number, wnid in enumerate([*devkit_order(imagenet), "n00001740"], 1)]
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    io.savemat(data / "meta.mat", {"synsets": np.array(rows, dtype=kinds)[:, None]}, do_compression=True)
    assert open_pictures(str(flat), "val", num_classes=1000).labels == LABELS
    (data / "meta.mat").write_bytes((data / "meta.mat").read_bytes()[:5000])
    refused(lambda: open_pictures(str(flat), "val", num_classes=1000), "not a readable meta.mat of the devkit")


def test_numbers_go_by_the_list_of_words_that_lies_there(flat, imagenet):
    write(flat, "val.txt", imagenet)
    (flat / "synset_words.txt").write_text("\n".join(f"{wnid} name, other" for wnid in imagenet[::-1]))
    assert open_pictures(str(flat), "val", num_classes=1000).labels == [999 - label for label in LABELS]
    (flat / "synset_words.txt").write_text("tench\n")
    refused(lambda: open_pictures(str(flat), "val", num_classes=1000), "synset_words.txt: is no list of 1000 wnids")


BAD = {
    "none": (None, "", "no labels of its pictures: put one of val.txt"),
    "from 1": ("val.txt", "ILSVRC2012_val_00000001.JPEG 1000", "line 1: expected a name and a number from 0 to 999"),
    "cut off": ("val.txt", "ILSVRC2012_val_00000001.JPEG 1", "has no label for ILSVRC2012_val_00000002.JPEG"),
    "too short": ("imagenet_2012_validation_synset_labels.txt", "n01440764\n" * 5, "no label for .*00000006"),
    "a strange wnid": ("imagenet_2012_validation_synset_labels.txt", "n99999999\n" * 6, "'n99999999' is none of"),
    "a strange id": (TRUTH, "1\n1001\n1\n1\n1\n1\n", "line 2: '1001' is no ILSVRC2012_ID"),
}


@pytest.mark.parametrize("case", BAD)
def test_labels_that_do_not_fit_are_refused(flat, imagenet, case):
    name, text, reason = BAD[case]
    if name:
        (flat / name).write_text(text)
    clsloc(flat, imagenet)
    with pytest.raises(SwinQuantError, match=reason):
        open_pictures(str(flat), "val", num_classes=1000)
