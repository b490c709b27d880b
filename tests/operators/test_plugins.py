"""Libraries compiled at first use, with stand-ins of a compiler that copy a text."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.operators import plugins
from swin_quant.operators.plugins import compiled

BUILD = 'echo built >> "$(dirname "$0")/builds"\nexec $CXX "$1/lib.so"\n'
TEST = "import sys\nsys.exit('wrong sums' if 'bad' in open(sys.argv[1]).read() else 0)\n"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with a build script, a self-test, and a compiler that writes a library."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "build.sh").write_text(BUILD)
    (folder / "selftest.py").write_text(TEST)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path, 'echo code > "$1"'))
    return folder


def script(folder, text):
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def builds(sources):
    log = sources / "builds"
    return len(log.read_text().splitlines()) if log.exists() else 0


def refusal(sources):
    with pytest.raises(SwinQuantError) as caught:
        compiled(sources, "sums", {"ENGINE": "1"})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_library_is_built_once_for_its_sources_and_what_it_is_for(sources, tmp_path, caplog):
    caplog.set_level("INFO")
    first = compiled(sources, "sums", {"ENGINE": "1", "ISA": "vnni"})
    assert compiled(sources, "sums", {"ENGINE": "1", "ISA": "vnni"}) == first and builds(sources) == 1
    assert first.read_text() == "code\n" and first.parent == tmp_path / "cache" / "swin-quant" / "operators"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    (said,) = caplog.messages
    assert re.match("sums: compiled for this CPU in [0-9]+ s, once: ", said) and str(first) in said
    other = compiled(sources, "sums", {"ENGINE": "2", "ISA": "vnni"})
    (sources / "more.hpp").write_text("// more")
    assert len({first, other, compiled(sources, "sums", {"ENGINE": "1", "ISA": "vnni"})}) == 3 == builds(sources)


def test_who_asks_at_the_same_time_waits_for_one_build(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path, 'sleep 0.3; echo code > "$1"'))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: compiled(sources, "sums", {"ENGINE": "1"}), range(3)))
    assert len(set(found)) == 1 == builds(sources)


@pytest.mark.parametrize("named", [None, "no-such-compiler -O3"])
def test_no_compiler(sources, monkeypatch, tmp_path, named):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    if named:
        monkeypatch.setenv("CXX", named)
    assert refusal(sources) == (f"CXX is {named}, which is not installed" if named else "no C++ compiler is installed")
    assert builds(sources) == 0


def test_a_compiler_that_fails(sources, tmp_path, monkeypatch):
    text = "echo 'in file x.hpp:' >&2; echo 'x.hpp:3:1: fatal error: no cmath' >&2; echo 'terminated.' >&2; exit 1"
    monkeypatch.setenv("CXX", script(tmp_path, text))
    assert refusal(sources).endswith("compiler fails: x.hpp:3:1: fatal error: no cmath")
    monkeypatch.setenv("CXX", script(tmp_path, "exit 3"))
    assert refusal(sources).endswith("compiler fails: it ended with 3")
    monkeypatch.setenv("CXX", script(tmp_path, "exit 0"))
    assert refusal(sources).endswith("its build wrote no library")
    assert not [file for file in (tmp_path / "cache" / "swin-quant" / "operators").iterdir()]


def test_a_library_that_fails_its_self_test_is_refused_and_not_built_again(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path, 'echo bad > "$1"'))
    assert refusal(sources) == "its self-test failed: wrong sums"
    assert refusal(sources).startswith("its self-test failed before (remove ") and builds(sources) == 1
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize("damage", ["library", "record", "none"])
def test_a_library_that_was_changed_is_built_again(sources, damage, caplog):
    library = compiled(sources, "sums", {"ENGINE": "1"})
    if damage == "library":
        library.write_text("foreign")
    elif damage == "record":
        library.with_suffix(".json").write_text("[1]")
    else:
        library.unlink()
    assert compiled(sources, "sums", {"ENGINE": "1"}).read_text() == "code\n" and builds(sources) == 2
    assert damage == "none" or f"{library}: is not the library that was built there" in caplog.text


def test_a_folder_that_others_can_enter(sources, tmp_path, monkeypatch):
    folder = compiled(sources, "sums", {"ENGINE": "1"}).parent
    for mode in (0o720, 0o702, 0o755):
        folder.chmod(mode)
        assert refusal(sources).startswith(f"{folder}: others have access: `chmod 700` it")
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert refusal(sources) == f"{folder}: is not a folder of yours: move it away"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "links"))
    (tmp_path / "links" / "swin-quant").mkdir(parents=True)
    (tmp_path / "links" / "swin-quant" / "operators").symlink_to(folder)
    assert refusal(sources).endswith("operators: is not a folder of yours: move it away")
    assert builds(sources) == 1


def own(file, user):
    if os.geteuid() != 0:
        pytest.skip("only root gives a file to another user")
    os.lchown(file, user, user)


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("damage", ["owner", "mode", "link", "dangling link", "folder"])
def test_a_library_that_others_may_have_written_is_refused_by_name(sources, damage, suffix):
    """Also with the right hash. It is not loaded, and nothing is built in its place."""
    file = compiled(sources, "sums", {"ENGINE": "1"}).with_suffix(suffix)
    moved = file.with_name("moved")
    if damage == "owner":
        own(file, 12345)
    elif damage == "mode":
        file.chmod(0o777)
    else:
        file.rename(moved)
        file.mkdir() if damage == "folder" else file.symlink_to(moved if damage == "link" else "nowhere")
    said = {"owner": "belongs to another user", "mode": "others can write to it"}.get(damage, "is a link, or no file")
    assert refusal(sources) == f"{file}: {said}: remove it, and it is built again"
    assert builds(sources) == 1
    file.rmdir() if damage == "folder" else file.unlink()
    assert compiled(sources, "sums", {"ENGINE": "1"}).read_text() == "code\n" and builds(sources) == 2


@pytest.mark.parametrize("level", ["cache", "cache/swin-quant", "link"])
@pytest.mark.parametrize("damage", ["owner", "mode"])
def test_a_cache_below_a_folder_that_others_can_write_to_is_refused(sources, tmp_path, monkeypatch, level, damage):
    """Who renames a parent puts a folder of his own in place; also where a link leads there."""
    compiled(sources, "sums", {"ENGINE": "1"})
    parent = tmp_path / ("cache" if level == "link" else level)
    if level == "link":
        (tmp_path / "link").symlink_to(parent)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    own(parent, 12345) if damage == "owner" else parent.chmod(0o777)
    said = f"{parent} belongs to another user" if damage == "owner" else f"others can write to {parent}"
    assert said in refusal(sources) and builds(sources) == 1
    if damage == "mode":
        parent.chmod(0o1777)  # as /tmp: nobody renames what is another's
        compiled(sources, "sums", {"ENGINE": "1"})


def test_a_build_that_takes_too_long_ends_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_SECONDS", 0.5)
    pid = tmp_path / "pid"
    said = plugins._failure(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], dict(os.environ))
    assert said == "it took more than 0.5 s"
    compiler = Path("/proc", pid.read_text().strip())
    end = time.monotonic() + 5
    while compiler.exists() and "Z" not in (compiler / "stat").read_text().split()[2] and time.monotonic() < end:
        time.sleep(0.05)
    assert not compiler.exists() or "Z" in (compiler / "stat").read_text().split()[2]
