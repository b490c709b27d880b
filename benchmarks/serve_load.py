"""The effect on good clients of `swin-quant serve` of clients whose requests are expensive to read.

    python benchmarks/serve_load.py out/my_int8.onnx [--engine openvino] [--clients 2] [--seconds 8] [--rounds 3]

It starts a service on a free port. Windows with and without bombs take turns; in each, `--clients` send one JPEG after
another, and one checks twenty times a second whether the service is live. Every half second another process sends a
bomb, whether the last one was answered or not, one kind after another:

- a JPEG of 396 kB, 8192 x 8192 pixels in 31 scans;
- a JPEG of 8192 x 8192 pixels in one scan, and a WebP of 4096 x 4096, which the service takes;
- a PNG of 27 MB that is a million empty parts, from a client that goes away when it has sent it;
- 31 MB of JSON, `{"inputs":[[],[],...`, and 31 MB of numbers that are none of the model's;
- a body of 27 MB that stops after half of it.

Memory is that of the service and its processes, above its value before the first window: the largest of samples every
20 ms. A good picture that is refused or lost, or gets another's answer, ends the run; with `--lenient` it is counted.
"""

import contextlib
import http.client
import itertools
import json
import multiprocessing
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from pages import script_parser
from PIL import Image
from serve import jpeg, served

HEALTH_S, PATIENCE, PAGE = 0.05, 10, 4096


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--engine")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=0.5, metavar="SECONDS", help="comes a bomb")
    parser.add_argument("--only", nargs="+", help="of the kinds that the list below the table names")
    parser.add_argument("--lenient", action="store_true", help="go on when a good picture is refused")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    switch, stop, answers = context.Event(), context.Event(), context.Queue()
    with contextlib.ExitStack() as stack:
        port, server = stack.enter_context(served(args.artifact, args.engine, {"--timeout-s": PATIENCE}))
        stack.callback(switch.set)
        stack.callback(stop.set)  # before the switch
        context.Process(target=attack, args=(port, args.every, args.only, switch, stop, answers)).start()
        answers.get()  # the bombs are ready
        pictures = [jpeg(seed) for seed in range(16)]
        expected = [ask(port, picture)[1] for picture in pictures]
        window(port, server.pid, args.clients, 2, pictures, expected, args.lenient)
        idle = memory(server.pid)
        print(f"{args.artifact}, {args.clients} clients, windows of {args.seconds:g} s\n")
        print("| bombs | pictures/s | refused | p50 ms | p99 ms | health, slowest ms | memory, MB more |\n"
              "|---|---:|---:|---:|---:|---:|---:|")  # fmt: skip
        found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for with_bombs in [False, True] * args.rounds:
            (switch.set if with_bombs else switch.clear)()
            settle(port, with_bombs)
            one = window(port, server.pid, args.clients, args.seconds, pictures, expected, args.lenient)
            found[with_bombs].append(one)
            print(row("with" if with_bombs else "without", [one], args.seconds, idle), flush=True)
        for with_bombs, name in ((False, "**all without**"), (True, "**all with**")):
            print(row(name, found[with_bombs], args.seconds * args.rounds, idle))
    counts: dict[str, Counter[str]] = {}
    for kind, status in iter(answers.get, None):
        counts.setdefault(kind, Counter())[status] += 1
    for kind, codes in sorted(counts.items()):
        print(f"- {kind}: {', '.join(f'{count} x {code}' for code, count in sorted(codes.items()))}")


def settle(port: int, with_bombs: bool) -> None:
    """Wait until bombs are ready, or until the last ones are gone."""
    end = time.perf_counter() + (1 if with_bombs else 2 * PATIENCE)
    while time.perf_counter() < end:
        time.sleep(0.5)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        if not with_bombs and b"held_bytes 0.0" in connection.getresponse().read():
            return


def row(name: str, windows: list[dict[str, Any]], seconds: float, idle: int) -> str:
    times, health = (list(itertools.chain(*[one[key] for one in windows])) for key in ("times", "health"))
    middle, last = np.percentile(times, [50, 99]) * 1000 if times else (np.nan, np.nan)
    refused, most = sum(one["refused"] for one in windows), max(one["memory"] for one in windows) - idle
    return (f"| {name} | {len(times) / seconds:.1f} | {refused} | {middle:.1f} | {last:.1f} | {max(health) * 1000:.1f} "
            f"| {most / 1e6:.0f} |")  # fmt: skip


def window(port: int, pid: int, clients: int, seconds: float, pictures: list[bytes], expected: list[Any],
           lenient: bool) -> dict[str, Any]:  # fmt: skip
    """Seconds of each good answer and each health check, and the most memory seen."""
    found: dict[str, Any] = {"times": [], "health": [], "refused": 0, "memory": 0}
    end, faults = time.perf_counter() + seconds, list[str]()

    def client(number: int) -> None:
        for index in itertools.islice(itertools.cycle(range(len(pictures))), number, None):
            start = time.perf_counter()
            if start > end:
                return
            status, answer = ask(port, pictures[index])
            if status == 200 and answer == expected[index]:
                found["times"].append(time.perf_counter() - start)
            else:
                found["refused"] += 1
                faults.append(f"{status}: {answer}")

    def health() -> None:
        while (start := time.perf_counter()) < end:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
            found["health"].append(time.perf_counter() - start)
            time.sleep(HEALTH_S)

    def watch() -> None:
        while time.perf_counter() < end:
            found["memory"] = max(found["memory"], memory(pid))
            time.sleep(0.02)

    works = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    works += [threading.Thread(target=work) for work in (health, watch)]
    for work in works:
        work.start()
    for work in works:
        work.join()
    if faults and not lenient:
        sys.exit(f"{len(faults)} good pictures failed: {faults[0]}")
    return found


def ask(port: int, picture: bytes) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/predict", picture)
        answer = connection.getresponse()
        content = json.loads(answer.read())
        return answer.status, [one["index"] for one in content.get("classes", [])] or content
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, repr(error)
    finally:
        connection.close()


def memory(pid: int) -> int:
    """Bytes of a process and its children, without shared and file-mapped memory."""
    total, started = 0, list[str]()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the process has ended
            started += (thread / "children").read_text().split()
    for one in [str(pid), *started]:
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = map(int, Path(f"/proc/{one}/statm").read_text().split())
            total += (resident - shared) * PAGE
    return total


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def bombs() -> Iterator[tuple[str, bytes, bytes, bool]]:
    """Name, path, body, and whether the answer is awaited."""
    large = Image.new("RGB", (8192, 8192), (120, 60, 30))
    progressive = encoded(large, "JPEG", progressive=True)
    last = progressive.rindex(b"\xff\xda")
    scan = progressive[last : progressive.rindex(b"\xff\xd9")]
    missing = 31 - progressive.count(b"\xff\xda")
    yield "31 scans", b"/predict", progressive[:last] + scan * (missing + 1) + b"\xff\xd9", True
    yield "1 scan", b"/predict", encoded(large, "JPEG"), True
    yield "WebP", b"/predict", encoded(Image.new("RGB", (4096, 4096), (9, 8, 7)), "WEBP", quality=50), True
    small, part = encoded(Image.new("RGB", (16, 16)), "PNG"), struct.pack(">I4sI", 0, b"tIME", zlib.crc32(b"tIME"))
    yield "27 MB PNG, gone", b"/predict", small[:33] + part * (27 * 2**20 // len(part)) + small[33:], False
    yield "31 MB JSON", b"/v2/models/NAME/infer", b'{"inputs":[' + b"[]," * (31 * 2**20 // 3) + b"[]]}", True
    head = b'{"inputs":[{"name":"images","datatype":"FP32","shape":[1,3,224,224],"data":['
    yield "31 MB of numbers", b"/v2/models/NAME/infer", head + b"0.25," * (31 * 2**20 // 5) + b"1]}]}", True
    yield "half a body", b"/predict", b"", True


def attack(port: int, every: float, only: list[str] | None, switch: Any, stop: Any, answers: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made = [bomb for bomb in bombs() if not only or bomb[0] in only]
    answers.put(("made", ""))
    name = b"x"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/predict/none")
    name = json.loads(connection.getresponse().read())["error"].rpartition("/")[2].encode()

    def throw(kind: str, path: bytes, body: bytes, waits: bool) -> None:
        size = len(body) or 27 * 2**20
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.replace(b"NAME", name), size)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=120) as sender:
                sender.sendall(head)
                sender.sendall(body or bytes(size // 2))
                answers.put((kind, sender.recv(4096).split(b" ")[1].decode() if waits else "not waited for"))
        except (OSError, IndexError) as error:
            answers.put((kind, type(error).__name__))

    thrown = []
    for bomb in itertools.cycle(made):
        switch.wait()
        if stop.is_set():
            break
        thrown.append(threading.Thread(target=throw, args=bomb))
        thrown[-1].start()
        time.sleep(every)
    for thread in thrown:
        thread.join()
    answers.put(None)


if __name__ == "__main__":
    main()
