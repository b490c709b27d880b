"""Layers of YAML, flags and cards become a checked tree; what is wrong names its file and key."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.base.errors import UsageError
from swin_quant.config import architecture, check_geometry, default_config, find_config, from_dict, load_config, to_dict
from swin_quant.config.load import portable_config
from swin_quant.config.outputs import need_logits
from tests.helpers.refusals import refused


def write(folder, text, name="user.yaml"):
    file = folder / name
    file.write_text(text)
    return file


def test_defaults_of_an_almost_empty_file(tmp_path):
    cfg = load_config(write(tmp_path, "MODEL: {}"))
    assert to_dict(cfg) == to_dict(default_config())
    assert cfg.TRAIN.OPTIMIZER.BETAS == (0.9, 0.999)
    assert cfg.is_frozen() and cfg.MODEL.SWIN.is_frozen()


def test_defaults_are_not_shared_between_trees():
    default_config().MODEL.SWIN.DEPTHS.append(7)
    assert default_config().MODEL.SWIN.DEPTHS == [2, 2, 6, 2]


def test_later_layers_win(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path, "DATA: {BATCH_SIZE: 1, NUM_WORKERS: 1, IMG_SIZE: 448}\nSEED: 1\nTAG: root", "root.yaml")
    write(tmp_path / "deep", "BASE: ['', ../root.yaml]\nDATA: {BATCH_SIZE: 2, NUM_WORKERS: 2}\nSEED: 2", "base.yaml")
    user = write(tmp_path, "BASE: [deep/base.yaml]\nDATA: {BATCH_SIZE: 3}\nSEED: 3")
    cfg = load_config(user, ["DATA.BATCH_SIZE", "4", "SEED", "4"], {"SEED": 5})
    assert (cfg.SEED, cfg.DATA.BATCH_SIZE, cfg.DATA.NUM_WORKERS, cfg.DATA.IMG_SIZE) == (5, 4, 2, 448)
    assert cfg.TAG == "root"
    assert cfg.BASE == [""]


def test_base_may_be_one_name_and_the_later_of_two_wins(tmp_path):
    write(tmp_path, "SEED: 1\nTAG: a", "a.yaml")
    write(tmp_path, "SEED: 2", "b.yaml")
    assert load_config(write(tmp_path, "BASE: a.yaml")).SEED == 1
    cfg = load_config(write(tmp_path, "BASE: [a.yaml, b.yaml]"))
    assert (cfg.SEED, cfg.TAG) == (2, "a")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("TRAIN.OPTIMIZER.EPS", "1e-8", 1e-8),
        ("TRAIN.CLIP_GRAD", "1", 1.0),
        ("MODEL.SWIN.DEPTHS", "[1, 1, 1, 1]", [1, 1, 1, 1]),
        ("TRAIN.OPTIMIZER.BETAS", "[0.8, 0.9]", (0.8, 0.9)),
        ("TRAIN.OPTIMIZER.BETAS", "(0.8, 9e-1)", (0.8, 0.9)),
        ("TRAIN.LR_SCHEDULER.MULTISTEPS", "[]", []),
        ("TRAIN.LR_SCHEDULER.MULTISTEPS", "[10, 20]", [10, 20]),
        ("DATA.ZIP_MODE", "True", True),
        ("MODEL.SWIN.QK_SCALE", "None", None),
        ("MODEL.SWIN.QK_SCALE", "0.5", 0.5),
        ("AUG.AUTO_AUGMENT", "none", None),
        ("AUG.AUTO_AUGMENT", "rand-m5", "rand-m5"),
        ("AUG.CUTMIX_MINMAX", "[0.2, 0.8]", (0.2, 0.8)),
        ("DATA.DATA_PATH", "__import__('os')", "__import__('os')"),
    ],
)
def test_values_take_the_type_of_their_key_in_files_and_opts(tmp_path, key, text, value):
    for cfg in (load_config(write(tmp_path, f"{key}: {text}")), load_config(write(tmp_path, "{}"), [key, text])):
        for part in key.split("."):
            cfg = cfg[part]
        assert cfg == value and type(cfg) is type(value)


def test_opts_keep_text_that_looks_like_a_number(tmp_path):
    assert load_config(write(tmp_path, "{}"), ["TAG", "007"]).TAG == "007"


@pytest.mark.parametrize(
    ("key", "bad", "asked"),
    [
        ("DATA.IMG_SIZE", [224, "wide"], "[1] must be a whole number"),
        ("DATA.IMG_SIZE", 224.0, "a whole number"),
        ("DATA.IMG_SIZE", {"X": 1}, "a whole number"),
        ("DATA.ZIP_MODE", "yes please", "true or false"),
        ("MODEL.NAME", 7, "text"),
        ("MODEL.DROP_RATE", "lots", "a number"),
        ("TRAIN.BASE_LR", float("nan"), "a number"),
        ("TRAIN.BASE_LR", "__import__('os').getcwd()", "a number"),
        ("MODEL.SWIN.DEPTHS", 2, "a list"),
        ("MODEL.SWIN.DEPTHS", [2, 2, 6.5, 2], "[2] must be a whole number"),
        ("MODEL.SWIN.DEPTHS", [2, [2], 6, 2], "[1] must be a whole number"),
        ("TRAIN.OPTIMIZER.BETAS", [0.9], "2 values"),
        ("MODEL.SWIN.QK_SCALE", "large", "a number or None"),
        ("AUG.CUTMIX_MINMAX", 0.5, "2 values or None"),
    ],
)
def test_a_wrong_type_names_key_file_and_what_is_asked_for(tmp_path, key, bad, asked):
    nested = bad
    for part in reversed(key.split(".")):
        nested = {part: nested}
    user = write(tmp_path, json.dumps(nested))
    for act, source in (
        (lambda: load_config(user), str(user)),
        (lambda: from_dict(nested, "run.json"), "run.json"),
        (lambda: load_config(write(tmp_path, "{}"), overrides={key: bad}), "command line"),
    ):
        message = refused(act, kind=UsageError)
        assert message.startswith(f"{source}: ")
        if not isinstance(bad, dict):
            assert f"{key}{'' if asked[0] == '[' else ' must be '}{asked}" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("MODEL: {SWIN: {WINDOWSIZE: 7}}", "unknown key MODEL.SWIN.WINDOWSIZE; did you mean MODEL.SWIN.WINDOW_SIZE?"),
        ("MODLE: {NAME: x}", "unknown key MODLE; did you mean MODEL?"),
        ("IMG_SIZE: 224", "unknown key IMG_SIZE; did you mean DATA.IMG_SIZE?"),
        ("data: {IMG_SIZE: 224}", "unknown key data; did you mean DATA?"),
        ("MODEL: {SWINV2: {QK_SCALE: 1.0}}", "unknown key MODEL.SWINV2.QK_SCALE"),
        ("TRAIN: {MOE: {SAVE_MASTER: true}}", "unknown key TRAIN.MOE"),
        ("xyzzy: 1", "unknown key xyzzy"),
        ("1: 2", "unknown key 1"),
        ("MODEL: swin", "MODEL is a section of keys, not 'swin'"),
        ("MODEL:", "MODEL is a section of keys, not None"),
        ("BASE: {a: b}", "BASE must be a list, not {'a': 'b'}"),
        ("BASE: [1]", "BASE[0] must be text, not 1"),
        ("BASE: [gone.yaml]", "BASE names gone.yaml, but there is no such file"),
        ('BASE: ["a\\0.yaml"]', "BASE names a\\x00.yaml, but there is no such file"),
        ("- MODEL", "must hold KEY: value lines"),
        ("", "must hold KEY: value lines"),
        ("MODEL:\n  NAME: [unclosed\n", "not valid YAML at line"),
        ("MODEL: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("SEED: 2001-99-99", "SEED must be a whole number, not '2001-99-99'"),
        ("[" * 5000, "not valid YAML"),
        ("a\0b", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, text, named):
    user = write(tmp_path, text)
    assert refused(lambda: load_config(user), kind=UsageError).startswith(f"{user}: {named}")


@pytest.mark.parametrize("way", ["above", "absolute", "link"])
def test_a_base_stays_near_the_configuration_and_what_is_elsewhere_is_not_shown(tmp_path, way):
    secret = write(tmp_path, "the first line of a secret", "secret.yaml")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    name = {"above": "../../secret.yaml", "absolute": str(secret), "link": "link.yaml"}[way]
    (tmp_path / "runs" / "one" / "link.yaml").symlink_to(secret)
    user = write(tmp_path / "runs" / "one", f"BASE: [{name}]")
    with pytest.raises(UsageError, match=f"^{user}: BASE names {name}, which leads away from") as error:
        load_config(user)
    assert "first line" not in str(error.value)


def test_a_circle_of_bases_names_its_files(tmp_path):
    write(tmp_path, "BASE: [b.yaml]", "a.yaml")
    write(tmp_path, "BASE: [a.yaml]", "b.yaml")
    with pytest.raises(UsageError, match=r"BASE goes in a circle: \S+a\.yaml -> \S+b\.yaml -> \S+a\.yaml$"):
        load_config(tmp_path / "a.yaml")


def test_bases_that_multiply_are_refused(tmp_path):
    for level in range(20):
        write(tmp_path, f"BASE: [{level + 1}.yaml, {level + 1}.yaml]", f"{level}.yaml")
    write(tmp_path, "{}", "20.yaml")
    refused(lambda: load_config(tmp_path / "0.yaml"), "0.yaml: BASE pulls in more than 32 files", kind=UsageError)


def test_files_that_are_no_configuration(tmp_path):
    ran = tmp_path / "ran"
    python = write(tmp_path, f"open({str(ran)!r}, 'w')\ncfg = {{}}", "cfg.py")
    refused(lambda: load_config(python), "cfg.py: a configuration file ends in .yaml", kind=UsageError)
    assert not ran.exists()
    refused(lambda: load_config(tmp_path / "gone.yaml"), "gone.yaml: no such configuration file", kind=UsageError)
    with pytest.raises(UsageError, match=r"\.yaml: no such configuration file"):
        (tmp_path / "folder.yaml").mkdir()
        load_config(tmp_path / "folder.yaml")
    with pytest.raises(UsageError, match=r"user\.yaml: is larger than the 1 MB"):
        load_config(write(tmp_path, "#" * (1 << 20) + "\n"))
    with pytest.raises(UsageError, match=r"latin\.yaml: not valid YAML"):
        (tmp_path / "latin.yaml").write_bytes(b"TAG: caf\xe9")
        load_config(tmp_path / "latin.yaml")


def test_bad_opts_and_overrides_name_where_they_came_from(tmp_path):
    user = write(tmp_path, "{}")
    with pytest.raises(UsageError, match="opts takes pairs KEY VALUE, but got 3 words: SEED 1 TAG"):
        load_config(user, ["SEED", "1", "TAG"])
    with pytest.raises(UsageError, match="^opts: unknown key DATA.IMGSIZE; did you mean DATA.IMG_SIZE"):
        load_config(user, ["DATA.IMGSIZE", "7"])
    with pytest.raises(UsageError, match="^opts: MODEL is a section"):
        load_config(user, ["MODEL", "{}"])
    with pytest.raises(UsageError, match="^opts: BASE works only in a YAML file"):
        load_config(user, ["BASE", "other.yaml"])
    with pytest.raises(UsageError, match="^command line: unknown key SED; did you mean SEED"):
        load_config(user, overrides={"SED": 1})


@pytest.mark.parametrize(
    ("opts", "named"),
    [
        ("DATA.IMG_SIZE 225", "DATA.IMG_SIZE 225 is not a multiple of MODEL.SWIN.PATCH_SIZE 4"),
        ("DATA.IMG_SIZE 256", "MODEL.SWIN.WINDOW_SIZE 7 does not divide stage 0, 64 x 64 (DATA.IMG_SIZE 256"),
        ("DATA.IMG_SIZE 28", "patches of an odd resolution cannot be merged: stage 0, 7 x 7 (DATA.IMG_SIZE 28"),
        ("MODEL.SWIN.NUM_HEADS [3,6,13,24]", "MODEL.SWIN.NUM_HEADS 13 does not divide the 384 channels of stage 2"),
        ("MODEL.SWIN.DEPTHS [2,2]", "each of MODEL.SWIN.DEPTHS [2, 2], MODEL.SWIN.NUM_HEADS [3, 6, 12, 24]"),
        ("MODEL.SWIN.DEPTHS []", "MODEL.SWIN.DEPTHS is [], but must be a list of 1 to 16 entries"),
        ("MODEL.SWIN.DEPTHS [2,2,0,2]", "MODEL.SWIN.DEPTHS[2] is 0, but must be at least 1 and at most 256"),
        ("MODEL.SWIN.PATCH_SIZE 0", "MODEL.SWIN.PATCH_SIZE is 0, but must be at least 1"),
        ("MODEL.SWIN.WINDOW_SIZE -7", "MODEL.SWIN.WINDOW_SIZE is -7, but must be at least 1"),
        ("MODEL.SWIN.MLP_RATIO 0", "MODEL.SWIN.MLP_RATIO is 0.0, but must be above 0"),
        ("MODEL.NUM_CLASSES 0", "MODEL.NUM_CLASSES is 0, but must be at least 1"),
        ("DATA.BATCH_SIZE 0", "DATA.BATCH_SIZE is 0, but must be at least 1"),
        ("MODEL.DROP_PATH_RATE 1", "MODEL.DROP_PATH_RATE is 1.0, but must be at least 0 and below 1"),
        ("MODEL.DROP_RATE -0.1", "MODEL.DROP_RATE is -0.1, but must be at least 0 and below 1"),
        ("MODEL.TYPE swin_mlp", "MODEL.TYPE is 'swin_mlp', but must be one of swin, swinv2, timm"),
        ("DATA.INTERPOLATION cubic", "DATA.INTERPOLATION is 'cubic', but must be one of bicubic"),
        ("DATA.CACHE_MODE some", "DATA.CACHE_MODE is 'some', but must be one of no, full, part"),
        ("MODEL.SWIN.MLP_RATIO 1e30", "MODEL.SWIN.MLP_RATIO is 1e+30, but must be above 0 and at most 256"),
        ("MODEL.SWIN.NUM_HEADS [3,6,12,99999999999999999999]", "but must be at least 1 and at most 4096"),
        (f"DATA.BATCH_SIZE {10**20}", f"DATA.BATCH_SIZE is {10**20}, but must be at least 1 and at most 1048576"),
        ("TAG \udcff", "TAG is '\\udcff', but must be a name for a folder"),
        ("MODEL.NAME ../x", "MODEL.NAME is '../x', but must be a name for a file"),
        ("MODEL.NAME ..", "MODEL.NAME is '..', but must be a name for a file"),
        ("MODEL.NAME a\\b", "MODEL.NAME is 'a\\\\b', but must be a name for a file"),
        ("MODEL.TYPE swinv2 MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [12]", "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [12]"),
        ("MODEL.TYPE swinv2 MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [1,0,0,0]", "must be 0 (none) or at least 2"),
        ("MODEL.TYPE swinv2 MODEL.SWINV2.WINDOW_SIZE 1", "a window of 1 has no relative coordinates: stage 0"),
    ],
)
def test_impossible_models_name_keys_values_and_file(tmp_path, opts, named):
    user = write(tmp_path, "{}")
    line = refused(lambda: load_config(user, opts.split(" ")), named, kind=UsageError)
    assert line.startswith((f"{user} with your ", f"{user}: a window of 1"))


def buildable(family, picture, patch, window, embed, heads):
    """Build by hand: a grid of patches, windows over it, pairs of patches, heads over channels."""
    if len(range(0, picture, patch)) * patch != picture:
        return False
    grid = list(range(picture // patch))
    for stage, count in enumerate(heads):
        step = window if window < len(grid) else len(grid)
        if len(grid[::step]) * step != len(grid) or (family == "swinv2" and step == 1):
            return False
        if sum(embed * 2**stage // count for _ in range(count)) != embed * 2**stage:
            return False
        if stage < len(heads) - 1 and len(grid[0::2]) != len(grid[1::2]):
            return False
        grid = grid[::2]
    return True


@given(
    family=st.sampled_from(["swin", "swinv2"]),
    picture=st.integers(1, 40).map(lambda n: n * 8) | st.integers(1, 300),
    patch=st.sampled_from([1, 2, 4, 5]),
    window=st.integers(1, 16),
    embed=st.sampled_from([8, 12, 32, 96]),
    heads=st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=4),
)
def test_geometry_against_cutting_a_picture_by_hand(family, picture, patch, window, embed, heads):
    cfg = default_config()
    cfg.MODEL.TYPE = family
    cfg.DATA.IMG_SIZE = picture
    swin = architecture(cfg)
    swin.PATCH_SIZE, swin.WINDOW_SIZE, swin.EMBED_DIM = patch, window, embed
    swin.NUM_HEADS, swin.DEPTHS = heads, [1] * len(heads)
    if family == "swinv2":
        swin.PRETRAINED_WINDOW_SIZES = [0] * len(heads)
    if buildable(family, picture, patch, window, embed, heads):
        check_geometry(cfg, "any.yaml")
    else:
        with pytest.raises(UsageError, match=r"^any\.yaml: "):
            check_geometry(cfg, "any.yaml")


@pytest.mark.parametrize("name", ["swin_base_patch4_window12_384_finetune", "swinv2_digits"])
def test_a_tree_survives_json(name):
    cfg = load_config(find_config(name))
    again = from_dict(json.loads(json.dumps(to_dict(cfg))), "run.json")
    assert again == cfg and again.is_frozen()
    assert type(again.TRAIN.OPTIMIZER.BETAS) is tuple


def test_a_portable_config_names_no_folder():
    keys = {"DATA.DATA_PATH": "/home/me/imagenet", "MODEL.RESUME": "/tmp/x.pth", "OUTPUT": "/scratch/out"}
    text = json.dumps(portable_config(load_config(find_config("swin_digits"), overrides=keys)))
    assert "imagenet" in text and "x.pth" in text
    assert "/home" not in text and "/tmp" not in text and "/scratch" not in text


def test_pictures_that_are_not_square_have_height_and_width(tmp_path):
    """In YAML, in --opts and in a card; a square by both sides is one number."""
    file = write(tmp_path, "DATA: {IMG_SIZE: [192, 224]}")
    for cfg in (load_config(file), load_config(write(tmp_path, "{}", "b.yaml"), ["DATA.IMG_SIZE", "[192, 224]"])):
        assert cfg.DATA.IMG_SIZE == [192, 224] == from_dict(to_dict(cfg), "card").DATA.IMG_SIZE
    assert from_dict({}, "mine", {"DATA.IMG_SIZE": [224, 224]}).DATA.IMG_SIZE == 224
    for bad in ([224], [192, 224, 3]):
        with pytest.raises(
            UsageError,
            match="^mine with your DATA.IMG_SIZE: DATA.IMG_SIZE is .* but must be a side, or height and width$",
        ):
            from_dict({}, "mine", {"DATA.IMG_SIZE": bad})


@pytest.mark.parametrize(("kind", "word"), [("features", "output maps"), ("embedding", "embedding")])
def test_what_needs_logits_says_what_the_model_gives(kind, word):
    need_logits("logits", "accuracy")
    with pytest.raises(UsageError, match=f"^accuracy is about logits, and this model gives {word}: give a classifier$"):
        need_logits(kind, "accuracy")


def test_a_model_of_no_known_type_is_named():
    cfg = default_config()
    cfg.MODEL.TYPE = "resnext"
    with pytest.raises(UsageError, match="MODEL.TYPE is 'resnext', but must be one of swin, swinv2"):
        architecture(cfg)
