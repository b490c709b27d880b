"""A service in this process, of an engine whose logits are known, and requests to it."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import httpx2 as httpx
import numpy as np
import torch
from encoded import encoded
from PIL import Image

from swin_quant.backends.description import GraphEnd, ModelDescription
from swin_quant.data.preprocess import Preprocess
from swin_quant.serving.app import Service, ServiceLimits, build_app

SIDE, NAMES = 16, ("cat", "dog", "fox")
PREPROCESS = Preprocess(SIDE, False, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LOGITS = GraphEnd("logits", "float32", (3,))
MODEL = ModelDescription("micro", GraphEnd("images", "float32", (3, SIDE, SIDE)), (LOGITS,), NAMES)
MATRIX = torch.tensor([[3.0, -1.0, 0.5], [-2.0, 1.0, 0.0], [0.0, 2.0, -1.0]])


class Means:
    """An engine: the mean of each channel times a matrix. It remembers its batches; one above 1e6 breaks it."""

    def __init__(self, seconds=0.0):
        self.batches, self.seconds = [], seconds

    def __call__(self, images):
        import time

        time.sleep(self.seconds)
        self.batches.append(len(images))
        if images.abs().max() > 1e6:
            raise RuntimeError("secret words of a library")
        return images.mean((2, 3)) @ MATRIX


def logits_of(images):
    return (images.mean((2, 3)) @ MATRIX).numpy()


def with_client(service, work):
    """Run `work(client)` against the application, started and stopped as a server does."""
    app = build_app(service)

    async def go():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await work(client)

    return asyncio.run(go())


def posted(service, *requests, at_once=False):
    """The answers to posts of (place, arguments of the client)."""

    async def work(client):
        if at_once:
            return await asyncio.gather(*[client.post(place, **given) for place, given in requests])
        return [await client.post(place, **given) for place, given in requests]

    return with_client(service, work)


@contextmanager
def listening(server):
    """The address of a server of `build_server`, which runs in a thread of its own meanwhile."""
    server.install_signal_handlers = lambda: None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def service(engine=None, **limits):
    return Service(MODEL, engine or Means(), PREPROCESS, limits=ServiceLimits(**limits), about={"engine": "means"})


def png(seed=0, size=(20, 24)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    return encoded(Image.fromarray(pixels))


def body_of(images, **more):
    """A request in JSON."""
    array = np.asarray(images)
    kind = "UINT8" if array.dtype == np.uint8 else "FP32"
    tensor = {"name": "images", "datatype": kind, "shape": list(array.shape), "data": array.ravel().tolist()}
    return {"inputs": [tensor], **more}


INFER = "/v2/models/micro/infer"
FLAT = {"name": "images", "datatype": "FP32", "shape": [1, 3, SIDE, SIDE], "data": [0.0] * 3 * SIDE**2}
