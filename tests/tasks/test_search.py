"""The search on layers whose error and time are known: what is tried where loss and time are limited both."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from swin_quant.base.journal import Journal
from swin_quant.config import find_config, load_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.distance import Loss
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Rule, named_nodes
from swin_quant.quant.search import Budget, Unit
from swin_quant.tasks import policy_costs
from swin_quant.tasks import search as searching
from swin_quant.tasks.measured_on import MeasuredOn, of_config
from swin_quant.tasks.measuring import Measuring
from swin_quant.tasks.policy_costs import Measured
from swin_quant.tasks.sensitivity import Sampling


class Known:
    """A bench of layers whose errors and milliseconds add up: 1 ms with all of them in int8."""

    units = (
        *(Unit(f"dear{i}", (f"dear{i}.x",), 0.2, 0.05) for i in range(3)),
        Unit("slow", ("slow.x",), 0.5, 1.0),
        *(Unit(f"good{i}", (f"good{i}.x",), 0.001, 0.05) for i in range(6)),
    )
    pictures, card_file, float_cost, has_others = 8, None, 3.0, False

    def __init__(self, asked):
        self.journal = self
        self.off = {}

    def keep(self, *_):
        pass

    def policy(self, off):
        found = load_policy("onnxruntime").and_then(Rule(disable=tuple(sorted(off))))
        self.off[found.name] = off
        return found

    def takes(self, policy):
        return False

    def nodes_off(self, policy):
        return ["blocks.0.softmax", "blocks.1.softmax", *(f"{name}.x" for name in self.off[policy.name])]

    def nodes_on(self, policy):
        return len(self.units) - len(self.off[policy.name])

    def loss(self, policy):
        left = sum(unit.error for unit in self.units if unit.name not in self.off[policy.name])
        return Loss(-10 * math.log10(max(left, 1e-9)), left, 99.0, 0.0)

    def loss_of_others(self, policy):
        return None

    def costs(self, policies):
        return {p.name: 1 + sum(u.saved_ms for u in self.units if u.name in self.off[p.name]) for p in policies}


def test_with_both_limits_the_most_that_the_time_allows_is_tried_too(tmp_path, monkeypatch):
    """Within the loss, 2 layers stay float, one of which takes a millisecond; the time has room for 3 others."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(searching, "Measured", Known)
    of = Measuring(load_config(find_config("swin_digits")), "x.pth", "onnxruntime", tmp_path)
    budget = Budget(min_sqnr=-10 * math.log10(0.45))
    found = searching.search(searching.PolicySearch(of, budget, max_ms=1.2))
    assert not found.met and {unit.name for unit in found.left_float} == {"dear0", "dear1", "dear2"}
    text = found.file.read_text()
    assert all(f"# dear{i}: " in text for i in range(3))
    assert text.endswith("# policy onnxruntime leaves these float:\n#   blocks.*.softmax: 2\n")


def test_a_drop_next_to_nothing_is_a_budget_like_any(tmp_path, monkeypatch, caplog):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(searching, "Measured", Known)
    of = Measuring(load_config(find_config("swin_digits")), "x.pth", "onnxruntime", tmp_path)
    budget = Budget(max_drop=1e-310, min_sqnr=-10 * math.log10(0.45))
    assert searching.search(searching.PolicySearch(of, budget)).met
    assert "8 pictures hardly tell" in caplog.text


class Flattering(Known):
    """Where the pictures by which policies are chosen are kind to all of them, and others tell half of the error."""

    has_others = True

    def loss(self, policy):
        return replace(super().loss(policy), drop=0.01)

    def loss_of_others(self, policy):
        loss = super().loss(policy)
        return replace(loss, drop=loss.kl / 2)


@pytest.mark.parametrize("limit", [0.2, 0.26, 0.05])
def test_a_drop_that_other_pictures_do_not_bear_out_is_searched_for_again(tmp_path, monkeypatch, limit):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(searching, "Measured", Flattering)
    of = Measuring(load_config(find_config("swin_digits")), "x.pth", "onnxruntime", tmp_path)
    found = searching.search(searching.PolicySearch(of, Budget(max_drop=limit)))
    off = {unit.name for unit in found.left_float}
    left = sum(unit.error for unit in Known.units if unit.name not in off)
    assert found.met and 0 < found.found.nodes and left / 2 <= limit
    assert found.found.loss.drop == pytest.approx(max(0.01, left / 2))
    assert "the drop on others, too" in " ".join(found.file.read_text().split())


def test_a_rival_whose_ranges_are_not_there_is_left_out(tiny_model, use_policy):
    """Lower ends, which other tools do not write."""
    model = use_policy(tiny_model("swin", DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    calibrate(model, [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))])
    for node in named_nodes(model).values():
        node.bounds = None
    bench = object.__new__(Measured)
    bench.model, bench.card, bench.asked = model, None, SimpleNamespace(checkpoint="x.pth", is_timed=True)
    assert bench.takes(load_policy("qdq")) and not bench.takes(load_policy("onnxruntime"))


def test_pictures_of_several_sizes_are_measured_one_by_one(tmp_path):
    cfg = load_config(find_config("swin_digits"), overrides={"TEST.SHAPE": "shorter", "DATA.DATA_PATH": str(tmp_path)})
    (tmp_path / "val").mkdir()
    for name, width in (("a", 40), ("b", 60)):
        Image.new("RGB", (width, 40)).save(tmp_path / "val" / f"{name}.png")
    found = of_config(cfg, Sampling(2, "val"), Preprocess.from_config(cfg))
    assert len({tuple(images.shape) for images in found.batches}) == 2


@pytest.mark.parametrize("total, others", [(9, 4), (7, 3), (4, 0)])
def test_what_confirms_is_none_of_what_chose(tmp_path, total, others):
    cfg = load_config(find_config("swin_digits"), overrides={"DATA.DATA_PATH": str(tmp_path)})
    (tmp_path / "val").mkdir()
    for level in range(total):
        Image.new("RGB", (28, 28), (20 * level,) * 3).save(tmp_path / "val" / f"{level}.png")
    found = of_config(cfg, Sampling(4, "val"), Preprocess.from_config(cfg))
    again = torch.cat(found.others()) if others else torch.zeros(0)
    assert (found.others is None) is (others == 0) and len(again) == others
    levels = [{round(one.mean().item(), 3) for one in images} for images in (torch.cat(found.batches), again)]
    assert len(levels[0]) == 4 and len(levels[1]) == others and not levels[0] & levels[1]


def test_limits_are_written_alike_whatever_numbers_they_are(tmp_path):
    pytest.importorskip("onnxruntime")
    of = Measuring(load_config(find_config("swin_digits")), "x.pth", "onnxruntime", tmp_path)
    flags = [searching.PolicySearch(of, Budget(max_drop=one)).flags for one in (1, 1.0, np.float64(1))]
    assert flags == [["--max-drop 1.0"]] * 3


@pytest.mark.parametrize("found", [[-1000.0, 5.0], [1.0, 0.0], [True, 2.0]])
def test_milliseconds_that_nothing_takes_are_measured_anew(tmp_path, monkeypatch, caplog, found):
    (tmp_path / "x.json").write_text(json.dumps({"subject": {}, "entries": {"ms of all and none": found, "ms a": -1}}))
    bench = Measured.__new__(Measured)
    bench.asked, bench.journal = None, Journal(tmp_path / "x.json", {})
    monkeypatch.setattr(policy_costs, "extremes", lambda asked: (2.0, 3.0))
    assert (bench.base_ms, bench.float_ms) == (2.0, 3.0) and "; measured anew" in caplog.text
    assert bench._known_ms("a") is None and json.loads((tmp_path / "x.json").read_text())["entries"]["ms a"] == -1


def test_layers_of_another_model_are_measured_anew(tmp_path, monkeypatch, caplog):
    entries = {"layers alone": {"fc1": {"nodes": ["no such node"], "error": 0.1}}}
    (tmp_path / "x.json").write_text(json.dumps({"subject": {}, "entries": entries}))
    bench = Measured.__new__(Measured)
    bench.model, bench.journal = torch.nn.Linear(1, 1), Journal(tmp_path / "x.json", {})
    monkeypatch.setattr(bench, "_alone", dict, raising=False)
    assert bench.layers == {} and "must be of this model's nodes; measured anew" in caplog.text


def test_what_was_found_by_other_timing_is_not_taken_for_what_is_asked_for(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "x.pth").write_bytes(b"")
    shown = MeasuredOn([], ["a.png"])
    of = Measuring(load_config(find_config("swin_digits")), str(tmp_path / "x.pth"), "onnxruntime", tmp_path,
                   pictures=shown)  # fmt: skip
    asked = searching.PolicySearch(of, Budget(max_drop=1))
    policy = load_policy("qdq")
    asked.place.write_text(json.dumps(policy.to_dict()))
    Journal(of.journal, of.subject).keep({asked.found: policy.sha256}, str)
    assert searching.found_before(asked) == policy
    for other in ({"rounds": 9}, {"seconds": 2.0}):
        assert searching.found_before(replace(asked, of=replace(of, **other))) is None
    journal = json.loads(of.journal.read_text())
    del journal["subject"]["timing"]  # as those of before have it
    of.journal.write_text(json.dumps(journal))
    assert searching.found_before(asked) is None and Journal(of.journal, of.subject).found == 0
