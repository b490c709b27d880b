"""Requests a second and latency of `swin-quant serve`, beside plain calls of the same engine.

    python benchmarks/serve.py out/my_int8.onnx [--engine openvino] [--clients 1 4 16] [--seconds 10] [--bad 0.1]
        [--hanging 4]

It starts a service on a free port; each client sends one JPEG after another over its own connection. A share `--bad` of
the requests is a corrupt picture, or one that is too large. `--hanging` additional clients start a request, send
nothing more until they are cut off, and start again. Every good answer is compared with the engine's own for that
picture: a lost answer, or another client's, ends the run. Plain calls decode, preprocess and run the engine in one
thread, a picture at a time.
"""

import http.client
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import torch
from pages import script_parser
from PIL import Image

import swin_quant as sq
from swin_quant.data.pictures import decode
from swin_quant.data.preprocess import Preprocess

PICTURES, MEGABYTES, PATIENCE = 64, 1, 5


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--engine")
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--bad", type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--hanging", type=int, default=4)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--delay-us", type=int, default=2000)
    args = parser.parse_args()
    artifact = sq.artifact(args.artifact)
    engine, preprocess = artifact.load(args.engine), Preprocess.from_dict(artifact.card.preprocess)
    pictures = [jpeg(seed) for seed in range(PICTURES)]
    prepared = [preprocess(decode(picture, "it"))[None] for picture in pictures]
    expected = [engine(images).double().softmax(1)[0].numpy() for images in prepared]
    print(f"{args.artifact} on {engine.name}, {args.bad:.0%} bad pictures, {args.hanging} clients that hang;", end=" ")
    print(f"batches of at most {args.max_batch}\n")
    print("| clients | pictures/s | p50 ms | p99 ms | refused, of as many bad |\n|---|---:|---:|---:|---:|")
    seconds = plain(engine, preprocess, pictures, args.seconds)
    print(f"| plain calls | {row(seconds, sum(seconds))} | - |")
    del engine
    limits = {"--max-batch": args.max_batch, "--delay-us": args.delay_us, "--max-megabytes": MEGABYTES}
    with served(args.artifact, args.engine, limits | {"--timeout-s": PATIENCE}) as (port, _):
        for _ in range(args.hanging):
            threading.Thread(target=hang, args=(port,), daemon=True).start()
        for clients in args.clients:
            print(load(port, clients, args.seconds, args.bad, pictures, expected), flush=True)


@contextmanager
def served(artifact: str, engine: str | None, limits: dict[str, int]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The port of a service that is ready, and its process, which is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--engine", engine] if engine else []
    words += [str(word) for limit in limits.items() for word in limit]
    command = [sys.executable, "-m", "swin_quant", "serve", artifact, "--port", str(port), "--quiet", *words]
    server = subprocess.Popen(command)
    try:
        wait(port, server)
        yield port, server
    finally:
        server.send_signal(signal.SIGTERM)
        print(f"\nended with {server.wait(120)}")


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def plain(engine, preprocess: Preprocess, pictures: list[bytes], limit: float) -> list[float]:
    """Seconds of each picture, until the limit."""
    found: list[float] = []
    while sum(found) < limit:
        start = time.perf_counter()
        with torch.inference_mode():
            engine(preprocess(decode(pictures[len(found) % PICTURES], "it"))[None])
        found.append(time.perf_counter() - start)
    return found


def wait(port: int, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
    sys.exit("the service ended before it was ready")


def hang(port: int) -> None:
    """Send half a head or half a body, then nothing until the service closes the connection; and again."""
    for part in itertools.cycle((b"POST /predict HTTP/1.1\r\nHost:", b"POST /predict HTTP/1.1\r\nHost: x\r\n"
                                 b"Content-Length: 9999\r\n\r\nhalf")):  # fmt: skip
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(part)
                while connection.recv(4096):
                    pass
        except OSError:
            time.sleep(0.1)


def load(port: int, clients: int, limit: float, bad: float, pictures: list[bytes], expected: list[np.ndarray]) -> str:
    """A table row. SystemExit for a missing or wrong answer."""
    found: list[float] = []
    counts, faults = {"bad": 0, "refused": 0}, list[str]()
    end, lock = time.perf_counter() + limit, threading.Lock()

    def client(number: int) -> None:
        draw = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while time.perf_counter() < end:
            index, is_bad = draw.randrange(PICTURES), draw.random() < bad
            large = b"x" * ((MEGABYTES << 20) + 1)
            body = draw.choice([pictures[index][:300], large]) if is_bad else pictures[index]
            start = time.perf_counter()
            try:
                connection.request("POST", "/predict?top=99999", body)
                answer = connection.getresponse()
                content = json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if is_bad and body is large:  # the service may close before it is all sent
                    content, answer = {}, None
                else:
                    faults.append(f"lost: {error!r}")
                    return
            with lock:
                if is_bad:
                    counts["bad"] += 1
                    counts["refused"] += answer is None or answer.status in (400, 413)
                    continue
                found.append(time.perf_counter() - start)
            if answer is None or answer.status != 200:
                faults.append(f"a good picture was refused: {content}")
                return
            shares = {one["index"]: one["probability"] for one in content["classes"]}
            given = np.array([shares[place] for place in range(len(shares))])
            if np.abs(given - expected[index]).max() > 0.02:
                faults.append(f"an answer for another picture than {index}")
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        sys.exit(f"{len(faults)} clients failed: {faults[0]}")
    return f"| {clients} | {row(found, limit)} | {counts['refused']} of {counts['bad']} |"


def row(seconds: list[float], whole: float) -> str:
    middle, last = np.percentile(seconds, [50, 99]) * 1000
    return f"{len(seconds) / whole:.1f} | {middle:.1f} | {last:.1f}"


if __name__ == "__main__":
    main()
