"""A checkpoint fits the model entirely, or one line says why not and the model is unchanged."""

import pytest
import torch
from safetensors.torch import save_file

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import load_calibrated, load_float, open_checkpoint, save_calibrated, save_float
from swin_quant.checkpoint.identify import config_for
from swin_quant.checkpoint.opened import made_before
from swin_quant.models import build_model
from swin_quant.quant.quantizer import named_nodes
from tests.helpers import refusals
from tests.helpers.settings import change, small_config


def model(kind="swin", *, seed=0, **keys):
    torch.manual_seed(seed)
    return build_model(small_config(kind, **keys))


def calibrated(kind="swin", seed=1):
    made = model(kind, seed=seed)
    for index, node in enumerate(named_nodes(made).values()):
        node.amax = torch.tensor(0.5 + index / 7)
        change(node, enabled=True)
    return made


def state_of(made):
    return {key: value.clone() for key, value in made.state_dict().items()}


def equal(one, other) -> bool:
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def refused(load, made, path, *words, **options) -> None:
    before = state_of(made)
    assert refusals.refused(lambda: load(made, path, **options), *words).startswith(f"{path}: ")
    after = made.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before), "the model was changed"


def save(content, path):
    torch.save(content, path)
    return path


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_every_container_loads_bit_for_bit(tmp_path, kind):
    source = model(kind, seed=1)
    state = state_of(source)
    files = [
        save(state, tmp_path / "bare.pth"),
        save({"model": state, "epoch": 1}, tmp_path / "microsoft.pth"),
        save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "ddp.pth"),
    ]
    for name in ("ours.safetensors", "ours.pth", "ours.ckpt"):
        save_float(source, tmp_path / name)
        files.append(tmp_path / name)
    save_file(state, tmp_path / "theirs.safetensors")
    for file in (*files, tmp_path / "theirs.safetensors"):
        made = model(kind, seed=2)
        assert not equal(made, source)
        source_of_it = load_float(made, file)
        assert source_of_it.path == file and source_of_it.format.startswith(file.suffix[1:] + ",")
        assert equal(made, source), file


TRAINING = {"criterion.weight": torch.ones(3), "n_averaged": torch.tensor(3), "train_acc.total": torch.ones(1)}


def under(prefix, state):
    return {prefix + key: value for key, value in state.items()}


def parts(state, head, prefix):
    """The backbone under a prefix, and its head under another name."""
    return {
        key.replace("head.", head) if key.startswith("head.") else prefix + key: value for key, value in state.items()
    }


@pytest.mark.parametrize(
    "kept",
    [
        lambda state: under("model.", state) | TRAINING,
        lambda state: state | TRAINING | {"mask_token": torch.zeros(1, 1, 96)},
        *(lambda state, head=head: parts(state, head, "backbone.") for head in ("head.", "classifier.", "fc.")),
        lambda state: under("model.", parts(state, "head.", "encoder.")),
        lambda state: state | under("ema.", {key: value + 1 for key, value in state.items()}),
    ],
)
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_the_model_is_found_under_any_prefix_with_its_head_and_other_parts_beside_it(kind, kept, tmp_path):
    source = model(kind, seed=3)
    state = {key: value for key, value in source.state_dict().items() if not key.endswith("_amax")}
    path = save({"state_dict": kept(state)}, tmp_path / "x.pth")
    made = build_model(config_for(path))
    load_float(made, path)
    assert equal(made, source)


def test_a_set_that_is_asked_for_is_there(tmp_path):
    state = state_of(model(seed=1))
    path = save({"model": state, "model_ema": {key: value + 1 for key, value in state.items()}}, tmp_path / "x.pth")
    for name in ("ema", "raw", "model", "model_ema"):
        assert open_checkpoint(path).weights(name).source.weights == ("model_ema" if "ema" in name else "model")
    with pytest.raises(UsageError, match="weights teacher: it holds no such set of weights"):
        open_checkpoint(path).weights("teacher")
    path = save(state_of(calibrated()), tmp_path / "calibrated.pth")
    assert open_checkpoint(path).weights("ema").source.calibrated, "the file was made of that set"


def test_half_precision_becomes_float32(tmp_path):
    source = model("swinv2", seed=1)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        half = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state_of(source).items()}
        made = model("swinv2")
        load_float(made, save(half, tmp_path / "x.pth"))
        weights = made.state_dict()
        assert all(value.dtype is torch.float32 for value in weights.values() if value.is_floating_point())
        assert torch.equal(weights["head.weight"], half["head.weight"].float())
        table = "layers.0.blocks.0.attn.relative_coords_table"
        assert torch.equal(weights[table], source.state_dict()[table]), "rounded tables must not replace the model's"


def test_derived_buffers_may_be_absent_and_of_the_same_size_not_contradict(tmp_path):
    source = model("swinv2", seed=1)
    state = state_of(source)
    names = ("relative_position_index", "attn_mask", "relative_coords_table")
    assert all(any(key.endswith(name) for key in state) for name in names)
    made = model("swinv2")
    load_float(made, save({k: v for k, v in state.items() if not k.endswith(names)}, tmp_path / "x.pth"))
    assert equal(made, source)
    for name in names:
        key = next(key for key in state if key.endswith(name))
        wrong = save({**state, key: state[key] + 1}, tmp_path / "wrong.pth")
        refused(load_float, model("swinv2"), wrong, key, "other values")


@pytest.mark.parametrize(
    ("file", "wanted", "words"),
    [
        ({"kind": "swin"}, {"kind": "swinv2"}, ["Swin V1 (TYPE swin) checkpoint", "of Swin V2"]),
        ({"kind": "swinv2"}, {"kind": "swin"}, ["Swin V2 (TYPE swinv2) checkpoint", "of Swin V1"]),
        ({"EMBED_DIM": 32}, {}, ["the file has EMBED_DIM 32, the configuration EMBED_DIM 16"]),
        ({"DEPTHS": [2, 4]}, {}, ["the file has DEPTHS [2, 4], the configuration DEPTHS [2, 2]"]),
        ({"NUM_HEADS": [2, 4]}, {}, ["the file has NUM_HEADS [2, 4], the configuration NUM_HEADS [1, 2]"]),
        ({"PATCH_SIZE": 4, "image": 64}, {}, ["PATCH_SIZE 4", "IMG_SIZE 64"]),
        (
            {"kind": "swinv2", "PRETRAINED_WINDOW_SIZES": [8, 8]},
            {"kind": "swinv2"},
            ["relative_coords_table", "pretrained window"],
        ),
    ],
)
def test_another_architecture_is_diagnosed(tmp_path, file, wanted, words):
    save_float(model(**file), tmp_path / "x.pth")
    refused(load_float, model(**wanted), tmp_path / "x.pth", *words)


def test_missing_unexpected_and_misshapen_keys_are_one_error(tmp_path):
    state = state_of(model())
    del state["norm.bias"]
    state["surplus.weight"] = torch.ones(1)
    state["norm.weight"] = torch.ones(5)
    state["head.bias"] = torch.ones(10, dtype=torch.int64)
    path = save(state, tmp_path / "x.pth")
    refused(
        load_float,
        model(),
        path,
        "1 missing: norm.bias",
        "1 unexpected: surplus.weight",
        "2 unfit: norm.weight (is [5], must be [32])",
        "head.bias (is torch.int64",
    )


@pytest.mark.parametrize(
    "key", ["criterion.weight", "loss_fn.weight", "val_acc.total", "n_averaged", "mask_token", "ema.decay", "queue_ptr"]
)
def test_what_only_training_had_is_left_out(tmp_path, caplog, key):
    source, made = model(seed=1), model()
    path = save(state_of(source) | {key: torch.ones(3)}, tmp_path / "x.pth")
    load_float(made, path)
    assert equal(made, source) and f"no part of the model, left out: {key}" in caplog.text


@pytest.mark.parametrize(
    "key", ["norm0.weight", "pos_embed", "layers.0.blocks.0.gamma_1", "head_dist.weight", "adapter.weight", "fc.weight"]
)
def test_what_would_change_the_logits_is_an_error(tmp_path, key):
    path = save(state_of(model(seed=1)) | {key: torch.ones(3), "n_averaged": torch.tensor(1)}, tmp_path / "x.pth")
    refused(load_float, model(), path, f"1 unexpected: {key}")


def test_a_head_of_another_size_needs_the_flag(tmp_path):
    source = model(classes=7, seed=1)
    save_float(source, tmp_path / "x.pth")
    made = model()
    refused(load_float, made, tmp_path / "x.pth", "head has 7 classes", "MODEL.NUM_CLASSES is 10", "replace_head")
    own = made.head.weight.clone()
    load_float(made, tmp_path / "x.pth", replace_head=True)
    assert torch.equal(made.head.weight, own), "the new head is the model's own"
    assert torch.equal(made.norm.weight, source.norm.weight)
    assert torch.equal(made.layers[0].blocks[0].attn.qkv.weight, source.layers[0].blocks[0].attn.qkv.weight)


def test_a_file_without_a_head_needs_the_flag_and_the_flag_forgives_nothing_else(tmp_path):
    state = {key: value for key, value in state_of(model(seed=1)).items() if not key.startswith("head.")}
    path = save(state, tmp_path / "x.pth")
    refused(load_float, model(), path, "it has no head", "replace_head", "output_kind embedding")
    load_float(model(), path, replace_head=True)
    del state["norm.weight"]
    refused(load_float, model(), save(state, path), "1 missing: norm.weight", replace_head=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_weights_that_are_not_finite_in_float32_are_named(tmp_path, value):
    state = state_of(model())
    key = "layers.1.blocks.0.mlp.fc1.weight"
    state[key] = state[key].double()
    state[key][3, 5] = value
    refused(load_float, model(), save(state, tmp_path / "x.pth"), key, "NaN or Inf")


def test_float_loading_ignores_ranges_and_forgets_the_models(tmp_path):
    source = calibrated()
    save_calibrated(source, tmp_path / "x_calib.pth")
    made = calibrated(seed=5)
    load_float(made, tmp_path / "x_calib.pth")
    assert torch.equal(made.head.weight, source.head.weight)
    assert all(node.amax is None for node in named_nodes(made).values())


def test_ranges_of_one_element_and_per_channel_weights(tmp_path):
    state = state_of(calibrated())
    one, many = "layers.0.blocks.0.attn.qkv._input_quantizer", "layers.0.blocks.0.attn.qkv._weight_quantizer"
    state[f"{one}._amax"] = torch.tensor([3.25], dtype=torch.float64)
    state[f"{many}._amax"] = torch.rand(48, 1) + 0.1
    made = model()
    load_calibrated(made, save(state, tmp_path / "x.pth"))
    nodes = named_nodes(made)
    assert nodes[one].amax.shape == () and nodes[one].amax.dtype is torch.float32 and nodes[one].amax.item() == 3.25
    assert torch.equal(nodes[many].amax, state[f"{many}._amax"])


def test_a_float_file_is_no_calibrated_one(tmp_path):
    save_float(model(), tmp_path / "x.pth")
    refused(
        load_calibrated, model(), tmp_path / "x.pth", "float checkpoint", "never calibrated", "swin-quant calibrate"
    )


GELU = "layers.0.blocks.0.mlp.fc2._input_quantizer"
ENDS = f"{GELU}._bounds"
FAULTS = [
    ("missing", "layers.0.blocks.0.attn.matmul_q_input_quantizer._amax", None),
    ("not positive and finite", "layers.0.blocks.0.attn.matmul_k_input_quantizer._amax", torch.tensor(-1.0)),
    ("not positive and finite", "layers.0.blocks.0.mlp.fc1._aftergemm_quantizer._amax", torch.tensor(0.0)),
    ("not positive and finite", "layers.0.blocks.1.mlp.fc1._input_quantizer._amax", torch.tensor(float("nan"))),
    ("not positive and finite", "layers.0.downsample.reduction._input_quantizer._amax", torch.tensor(float("inf"))),
    ("of the wrong shape [2]", "layers.1.blocks.0.mlp.fc2._input_quantizer._amax", torch.ones(2)),
    ("of the wrong shape [47, 1]", "layers.0.blocks.0.attn.qkv._weight_quantizer._amax", torch.ones(47, 1)),
    ("of the wrong shape [16, 1]", "layers.0.blocks.0.attn.proj._aftergemm_quantizer._amax", torch.ones(16, 1)),
    ("of the wrong shape [0]", "layers.0.blocks.0.add1_local_input_quantizer._amax", torch.ones(0)),
    ("of torch.int64, not floating point", "layers.1.blocks.0.mlp.fc1._input_quantizer._amax", torch.tensor(3)),
    ("of torch.bool, not floating point", "layers.1.blocks.0.attn.qkv._input_quantizer._amax", torch.tensor(True)),
    ("of no node of this model", "layers.0.blocks.0.attn.surplus_quantizer._amax", torch.tensor(1.0)),
    *(
        ("not two floating point numbers (_bounds)", ENDS, torch.tensor(value))
        for value in (0.5, [-1, 1], [[-1.0, 1.0]])
    ),
    *(
        ("not around zero (_bounds)", ENDS, torch.tensor(value))
        for value in ([0.1, 1.0], [-2.0, -1.0], [0.0, 0.0], [float("nan"), 1.0], [-1.0, float("inf")])
    ),
]


@pytest.mark.parametrize(("fault", "key", "value"), FAULTS)
def test_one_wrong_range_is_named(tmp_path, fault, key, value):
    state = state_of(calibrated())
    state.pop(key, None)
    path = save(state | ({} if value is None else {key: value}), tmp_path / "x.pth")
    refused(load_calibrated, calibrated(seed=7), path, f"1 {fault}: {key.rpartition('.')[0]}", "calibrate")


def test_only_enabled_nodes_need_a_range_and_none_keeps_an_old_one(tmp_path):
    state, made = state_of(calibrated()), calibrated(seed=7)
    name = next(name for name, node in named_nodes(made).items() if node.setting.enabled)
    del state[f"{name}._amax"]
    change(named_nodes(made)[name], enabled=False)
    load_calibrated(made, save(state, tmp_path / "x.pth"))
    assert named_nodes(made)[name].amax is None


def asymmetric(seed=7):
    made = calibrated(seed=seed)
    change(named_nodes(made)[GELU], symmetric=False)
    return made


def test_both_ends_come_back_and_a_node_without_them_forgets_its_own(tmp_path):
    made = asymmetric()
    named_nodes(made)["layers.0.blocks.0.mlp.fc1._input_quantizer"].bounds = (-1.0, 1.0)
    ends = torch.tensor([-0.17, 2.0])
    load_calibrated(made, save(state_of(calibrated()) | {ENDS: ends}, tmp_path / "x.pth"))
    found = {name: node.bounds for name, node in named_nodes(made).items() if node.bounds is not None}
    assert found.keys() == {GELU} and torch.equal(found[GELU], ends)
    save_calibrated(made, tmp_path / "y.pth")
    again = asymmetric(seed=3)
    load_calibrated(again, tmp_path / "y.pth")
    assert torch.equal(named_nodes(again)[GELU].bounds, found[GELU]) and named_nodes(again)[GELU].grid == (-20, 235)


def test_a_file_of_before_zero_points_serves_every_policy_without(tmp_path):
    path = save(state_of(calibrated()), tmp_path / "x.pth")
    load_calibrated(calibrated(seed=7), path)
    refused(load_calibrated, asymmetric(), path, "1 without the lower end", GELU, "calibrate the model again")
    off = asymmetric()
    change(named_nodes(off)[GELU], enabled=False)
    load_calibrated(off, path)


def test_a_card_of_another_file_stops_only_what_was_calibrated(tmp_path):
    assert open_checkpoint(tmp_path).file == tmp_path and made_before(None) is None
    for name, state in (("float", {}), ("calibrated", {"head._amax": torch.tensor(1.0)})):
        file = tmp_path / f"{name}.pth"
        made = model()
        save_float(made, file)
        torch.save({**torch.load(file)["model"], **state}, file)
        RunCard("x", {}, {}, checkpoint={"file": file.name, "sha256": "0" * 64}).write(file.with_suffix(".json"))
        if state:
            with pytest.raises(SwinQuantError, match="is not the checkpoint of its run card"):
                made_before(file)
        else:
            assert made_before(file) is None
