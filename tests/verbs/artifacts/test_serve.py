"""swin-quant serve: an artifact over a real socket, replaced while it is served, with clients that misbehave."""

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from commands import free_port

from swin_quant.backends.artifact import finish_artifact
from swin_quant.cards.card import RunCard


@pytest.fixture
def served(fork):
    """start(file, words ...) -> the address of its service once it is ready, the port and the process."""

    def start(file, *words, begin=fork):
        port = free_port()
        child = begin(["serve", file, "--port", port, "--threads", 1, *words])
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if done := child.poll():
                pytest.fail(f"it ended: {done}")
            try:
                if ask(f"{address}/v2/health/ready")[0] == 200:
                    return address, port, child
            except OSError:
                time.sleep(0.05)
        pytest.fail("it never was ready")

    return start


def ask(url, body=None):
    """Status and content of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_service_from_start_to_end(served, hand_made, pictures, arithmetic):
    address, port, child = served(hand_made, "--engine", "onnxruntime", "--timeout-s", 1, "--max-megabytes", 0.1)
    files = sorted((pictures / "val").rglob("*.png"))
    hand_made.write_bytes(b"replaced while it is served")  # it is not read again
    hanging, vanishing = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\nhalf"
    hanging.sendall(head)
    vanishing.sendall(head)
    vanishing.close()
    for file in files:
        status, answer = ask(f"{address}/predict", file.read_bytes())
        logits = arithmetic(file)
        shares = np.exp(logits) / np.exp(logits).sum()
        assert status == 200 and [one["index"] for one in answer["classes"]] == np.argsort(-shares).tolist()
        np.testing.assert_allclose([one["probability"] for one in answer["classes"]], np.sort(shares)[::-1], atol=1e-5)
    assert ask(f"{address}/predict", b"no picture")[0] == 400
    assert ask(f"{address}/predict", b"x" * 200000)[0] == 413
    hanging.settimeout(30)
    assert b" 504 " in hanging.recv(4096).split(b"\r\n")[0]
    silent, late = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    late.sendall(head)
    about = ask(f"{address}/v2")[1]["model"]
    assert (about["engine"], about["file"]) == ("onnxruntime", "means.onnx")
    start = time.monotonic()
    os.kill(child.pid, signal.SIGTERM)
    done = child.wait(60)
    assert time.monotonic() - start < 3, "clients that hang do not keep it"
    silent.close(), late.close()
    assert done.code == 0 and "stopped" in done.err + done.out and "Traceback" not in done.err


def test_a_signal_while_it_starts_ends_it(run, hand_made, monkeypatch):
    """Also a postponed one (`cli.guard`), which comes as SIGALRM while uvicorn starts."""
    import uvicorn

    load = uvicorn.Config.load
    for number in (signal.SIGTERM, signal.SIGALRM):
        monkeypatch.setattr(
            uvicorn.Config, "load", lambda self, number=number: [signal.raise_signal(number), load(self)]
        )
        done = run("serve", hand_made, "--port", 0)
        assert done.code == 0 and "stopped" in done.err and "Traceback" not in done.err


def test_addresses_that_cannot_be_had(run, hand_made):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run("serve", hand_made, "--port", port).error(1)
        assert f"127.0.0.1:{port}: cannot be listened to: Address already in use: give another --port" in line
    assert "--port 70000: must be from 0 to 65535" in run("serve", hand_made, "--port", 70000).error(2)
    assert "--max-batch 0: must be from 1" in run("serve", hand_made, "--max-batch", 0).error(2)


def test_a_file_newer_than_what_is_installed_is_refused_by_its_own_name(run, hand_made):
    """`serve` reads a copy of it."""
    import onnx

    model = onnx.load(hand_made)
    model.ir_version = 99
    onnx.save(model, hand_made)
    finish_artifact(hand_made, RunCard.read(hand_made.with_suffix(".json")), "onnx", "float32", {})
    assert f"error: {hand_made}: is of file format (IR) 99" in run("serve", hand_made, "--port", 0).error(1)
