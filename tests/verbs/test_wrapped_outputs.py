"""Modules with outputs other than logits: named, of any rank, from wrapping to engines."""

import copy
from dataclasses import dataclass

import onnxruntime
import pytest
import torch
from nightly import share
from torch import nn
from torch.utils import _pytree
from vnni import exact_int8

import swin_quant as sq
from swin_quant.base.compat import import_timm, import_torchvision


@dataclass(frozen=True)
class Pair:
    """An output that nobody registered with torch, with another one in it."""

    first: "Inner"
    second: torch.Tensor


@dataclass
class Inner:
    values: list[torch.Tensor]
    name: str = "a"


class Net(nn.Module):
    """Maps, tokens, a vector and a number for each picture, in a structure that the test chooses."""

    def __init__(self, give):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.again, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.give = give

    def forward(self, x):
        maps = self.again(torch.relu(self.stem(x)))
        tokens = self.head(maps.flatten(2).transpose(1, 2))
        return self.give(x, maps, tokens, tokens.mean(1), tokens.mean((1, 2)))


STRUCTURES = {
    "dict": (lambda x, m, t, v, n: {"maps": m, "tokens": t, "vector": v, "number": n}, "maps tokens vector number"),
    "dataclasses": (lambda x, m, t, v, n: [Pair(Inner([t, m]), v)], "0.first.values.0 0.first.values.1 0.second"),
    "twice": (lambda x, m, t, v, n: {"one": v, "other": v}, "one other"),
    "ours": (lambda x, m, t, v, n: {"images": v, "head.weight": t, "linear": m}, "images head.weight linear"),
    "not numbers": (lambda x, m, t, v, n: {"ids": v.argmax(1), "vector": v, "text": "a", "tokens": t}, "vector tokens"),
}


@pytest.fixture(scope="module")
def images():
    return torch.randn(16, 3, 8, 10, generator=torch.Generator().manual_seed(1))


def _wrapped(give, images, **options):
    return sq.calibrate(sq.wrap(Net(give), (8, 10), name="mine", **options), [images], "cpu", passes=[])


@pytest.mark.parametrize("kind", share(STRUCTURES, 4))
def test_outputs_of_any_structure_come_by_name_from_every_engine(kind, images, tmp_path):
    give, names = STRUCTURES[kind]
    model = _wrapped(give, images)
    with torch.no_grad():
        flat, _ = _pytree.tree_flatten(Net(give).eval()(images))
        wanted = [one for one in flat if isinstance(one, torch.Tensor) and one.is_floating_point()]
    assert list(model(images)) == names.split()
    made = sq.export(model, "openvino", tmp_path)
    for engine in (model, made.load("openvino"), made.load("onnxruntime")):
        found = engine(images[:3])
        assert list(found) == names.split()
        for part, right in zip(found.values(), wanted, strict=True):
            assert part.shape == right[:3].shape
            assert right[:3].square().sum() > 300 * (part - right[:3]).square().sum()


NO_TENSOR = "gives no tensor of float numbers: "
EACH, CHOOSE = "for 2 inputs, not one each", "choose others by output"
INVALID = [
    (lambda x, m, t, v, n: {"a": t, "b": v}, ["a", "c"], "output c: mine gives a, b"),
    (lambda x, m, t, v, n: {"a": t, "b": v}, "c", "output c: mine gives a, b: choose one of them"),
    (lambda x, m, t, v, n: "text", None, f"{NO_TENSOR}output"),
    (lambda x, m, t, v, n: (), None, f"{NO_TENSOR}nothing"),
    (lambda x, m, t, v, n: v.argmax(1), None, f"{NO_TENSOR}output"),
    (lambda x, m, t, v, n: {"loss": v.mean(), "a": t, "b": v}, None, rf"gives loss \[\] {EACH}: {CHOOSE}: a, b"),
    (lambda x, m, t, v, n: t.transpose(0, 1), None, r"gives output \[24, 2, 4\] for 2 inputs"),
    (lambda x, m, t, v, n: v / 0, None, "gives NaN or infinity"),
    (lambda x, m, t, v, n: [{"boxes": one[one[:, 0] > 0]} for one in t], None, rf"gives 0.boxes \[0, 4\] {EACH}"),
    (lambda x, m, t, v, n: {"a": v, "b": (t > 0).nonzero().float()}, None, f"{EACH}: {CHOOSE}: a"),
    (lambda x, m, t, v, n: v.sum(0)[:2], None, r"gives \[2\] for a batch of 3, not one each"),
]


@pytest.mark.parametrize(("give", "output", "says"), INVALID)
def test_invalid_outputs_are_refused_in_one_line(give, output, says):
    with pytest.raises(sq.SwinQuantError, match=says) as raised:
        sq.wrap(Net(give), (8, 10), name="mine", output=output)
    assert "\n" not in str(raised.value)


def test_outputs_without_classes_are_compared_with_float_together_and_each_by_its_name(images):
    """The figures equal those of whole forwards."""
    model = _wrapped(STRUCTURES["dict"][0], images)
    found = sq.evaluate(model, [images[:9], images[9:]], half="none")
    assert not found.results and found.float32 is None and "cosine" in str(found) and "maps" in found._repr_html_()
    ours, theirs = list(model(images).values()), model.module(images)
    pairs = [tuple(one.detach().double().reshape(16, -1) for one in pair) for pair in zip(ours, theirs, strict=True)]
    everything = tuple(torch.cat(side, 1) for side in zip(*pairs, strict=True))
    assert [score.output for score in found.outputs] == [None, "maps", "tokens", "vector", "number"]
    for score, (mine, exact) in zip(found.outputs, [everything, *pairs], strict=True):
        sqnr = 10 * torch.log10(exact.square().sum() / (mine - exact).square().sum())
        cosine = torch.nn.functional.cosine_similarity(mine, exact).mean()
        assert (score.pictures, score.policy) == (16, "cpu")
        assert score.sqnr_db == pytest.approx(float(sqnr), abs=1e-3) and score.cosine == pytest.approx(float(cosine))
    with pytest.raises(sq.UsageError, match="there is no batch to compare with"):
        sq.evaluate(model, [])
    with pytest.raises(sq.UsageError, match="sensitivity is about logits, and this model gives output maps"):
        sq.sensitivity(model, [images])


def test_the_command_line_says_that_a_wrapped_module_is_for_python(images, run, tmp_path):
    file = _wrapped(STRUCTURES["twice"][0], images).save(tmp_path / "mine_calib.pth")
    for words in (["evaluate", file], ["sensitivity", file], ["search", file, "--engine", "openvino", "--max-drop", 1]):
        assert "holds a wrapped module, which only Python builds: `sq.load(FILE, module)`" in run(*words).error(2)


@pytest.mark.nightly
def test_an_encoder_of_transformers_goes_the_whole_way(tmp_path):
    import_timm()  # allows torchvision beside a CPU-only torch
    import transformers

    torch.manual_seed(0)
    sizes = {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    net = transformers.DonutSwinModel(transformers.DonutSwinConfig(image_size=[64, 32], **sizes)).eval()
    x = torch.randn(4, 3, 64, 32)
    model = sq.calibrate(sq.wrap(net, (64, 32), name="donut"), [x], "cpu", passes=[])
    found = sq.export(model, "openvino", tmp_path).load()(x)
    with torch.no_grad():
        wanted = net(x)
    assert list(found) == ["last_hidden_state", "pooler_output"]
    for key, part in found.items():
        assert wanted[key].square().sum() > 1000 * (part - wanted[key]).square().sum()


class Detector(nn.Module):
    """torchvision's SSDLite with its published sizes, up to the boxes and classes of its anchors."""

    def __init__(self):
        super().__init__()
        vision = import_torchvision()
        whole = vision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = whole.backbone, whole.head

    def forward(self, images):
        return self.head(list(self.backbone(images).values()))


@pytest.mark.nightly
def test_a_detector_of_torchvision_is_what_it_was_in_float_in_int8_and_on_an_engine(tmp_path):
    """Two heads over six maps, no residual unit, and batch norms whose channels differ a hundredfold."""
    torch.manual_seed(0)
    module, x = Detector().eval(), torch.randn(2, 3, 128, 128)
    for norm in [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]:
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.5, 2)
        norm.weight.data.uniform_(0.5, 1.5)
    model = sq.calibrate(sq.wrap(copy.deepcopy(module), 128, name="ssdlite"), [x], "cpu")
    with torch.no_grad():
        wanted = module(x)
        floats = model.module(x)
    engine = sq.export(model, "openvino", tmp_path).load()(x)
    assert list(engine) == list(model(x)) == list(wanted) == ["bbox_regression", "cls_logits"]
    for (key, exact), ours in zip(wanted.items(), floats, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())
        for found in (model(x)[key], engine[key]):
            assert exact.square().sum() > 1000 * (found - exact).square().sum()


class Queries(nn.Module):
    """A decoder of learned queries: its first attention does not depend on the picture; its projection is read, not
    called."""

    def __init__(self):
        super().__init__()
        self.stem, self.queries = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 5, 8))
        self.own, self.cross = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, images):
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        queries = self.queries + self.own(self.queries, self.queries, self.queries)[0]
        return self.cross(queries.expand(tokens.shape[0], -1, -1), tokens, tokens)[0].flatten(1)


def test_a_projection_that_no_picture_reaches_is_exported(tmp_path):
    torch.manual_seed(0)
    model, images = sq.wrap(Queries(), 16), torch.randn(8, 3, 16, 16)
    sq.calibrate(model, [images], "qdq", passes=[])
    expected = model(images)
    found = torch.as_tensor(sq.export(model, "onnxruntime", tmp_path).load()(images))
    assert (found - expected).square().sum() < 1e-3 * expected.square().sum()  # 30 dB, for ties that round differently


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


@exact_int8
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
