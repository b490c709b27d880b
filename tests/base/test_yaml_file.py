"""YAML as plain data: its meaning, and quick refusals of the rest of the language, by line."""

import os
import time

import pytest
import yaml

from swin_quant.base.errors import UsageError
from swin_quant.base.yaml_file import read_yaml
from tests.helpers.refusals import refused


def read(folder, text):
    path = folder / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(path, "recipe")


def refusal(folder, text):
    started = time.process_time()
    with pytest.raises(UsageError) as caught:
        read(folder, text)
    assert time.process_time() - started < 2
    message = str(caught.value)
    assert message.startswith(f"{folder / 'x.yaml'}: ") and message.isprintable() and len(message) < 400
    return message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "~",
        "a: {b: [1, -2, +3, 4_000, 0x1F], c: [1.5, .5, 1., 1.0e+3, .inf, -.INF], d: [yes, off, True, null, '', x]}",
        "- '1'\n- \"no\"\n- |\n  two\n  lines\n- >-\n  one\n  line\n- 1e-4\n- 1.2.3\n- 0x\n- 'é'\n",
        "a: 1\nb:\n- x\n- {y: 2}\n",
        b"\xff\xfea\x00:\x00 \x001\x00",
    ],
)
def test_plain_data_means_what_it_means_to_pyyaml(tmp_path, text):
    assert read(tmp_path, text) == yaml.safe_load(text)


def test_keys_are_text(tmp_path):
    assert read(tmp_path, "on: 1\n2: 3\n~: 4\n") == {"on": 1, "2": 3, "~": 4}


def test_what_only_yaml_1_1_takes_for_numbers_and_dates_is_text(tmp_path):
    assert read(tmp_path, "[1:30, 2001-01-01, 2001-99-99, =]") == ["1:30", "2001-01-01", "2001-99-99", "="]
    assert read(tmp_path, "010") == 10


BOMBS = {
    "aliases": ("a: &a [x]\nb: [*a, *a]\n", "line 2: the alias *a"),
    "an alias as a key": ("a: &a x\n*a : 1\n", "line 2: the alias *a"),
    "merge keys": ("a: &a {k: 1}\nb:\n  <<: {k: 2}\n", "line 3: merge keys"),
    "nested merges": ("a: &a {}\n" + "".join(f"{c}: &{c} {{<<: [*a, *a]}}\n" for c in "bcd"), "line 2: merge keys"),
    "depth": ("[" * 100_000, "nested more than 32 levels"),
    "depth of blocks": ("- " * 100_000, "nested more than 32 levels"),
    "many values": ("[" + "1," * 100_000 + "]", "more than 10,000 values"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(50_000)), "more than 10,000 values"),
    "digits": ("a: " + "9" * 5000, "line 1: a number of 5000 digits"),
    "hexadecimal digits": ("a: 0x" + "f" * 5000, "a number of 5002 digits"),
    "bool": ("!!bool x", "the tag tag:yaml.org,2002:bool"),
    "code": ("!!python/object/apply:os.getcwd []", "the tag"),
    "local tag": ("!x {a: 1}", "the tag !x"),
    "the same key": ("a: 1\nb: 2\na: 3\n", "line 3: the key a is given twice"),
    "a list as a key": ("? [1]\n: 2\n", "a key must be text"),
    "two documents": ("a: 1\n---\nb: 2\n", "line 2: a second document"),
    "size": (b"#" * (2**20 + 1), "is larger than the 1 MB a recipe may have"),
    "no text": (b"\x80\x81", "not valid YAML"),
    "control characters": (b"a: \x00", "not valid YAML"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(tmp_path, name):
    text, says = BOMBS[name]
    assert says in refusal(tmp_path, text)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "x.yaml")
    refused(lambda: read_yaml(tmp_path / "x.yaml", "recipe"), "no such recipe", kind=UsageError)
