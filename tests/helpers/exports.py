"""Graphs from torch's exporter, stored for a test session: many tests export one model alike, which takes seconds."""

import copy
import functools
import hashlib
import io
import os
import pickle
from dataclasses import replace

import onnx
import torch

from swin_quant.base.errors import SwinQuantError


class _Content(pickle.Pickler):
    """Writes equal bytes for equal models, in any process: a tensor as its values' hash, a set in order."""

    def reducer_override(self, thing):
        if isinstance(thing, torch.Tensor):
            if type(thing) not in (torch.Tensor, torch.nn.Parameter):
                raise pickle.PicklingError("has more than its values")
            values = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return str, (f"{thing.dtype} {list(thing.shape)} {hashlib.sha256(values).hexdigest()}",)
        if isinstance(thing, set | frozenset):
            return sorted, (sorted(map(repr, thing)),)
        return NotImplemented


def _hash_of(things):
    """The hash; None if something has no lasting name, such as a class or function made by a test."""
    content = io.BytesIO()
    try:
        _Content(content).dump(things)
    except (pickle.PicklingError, AttributeError, TypeError, SwinQuantError):  # the last of a wrapped module
        return None
    return hashlib.sha256(content.getvalue()).hexdigest()


def kept(to_onnx, folder):
    """`to_onnx` with a folder of graphs: an equal model with equal options is read from there."""

    def export(model, images, options, int4, outputs, own, any_size):
        def made():
            return to_onnx(model, images, options, int4, outputs, own, any_size)

        how = replace(options, labels=None), tuple(int4), tuple(outputs), tuple(map(str, own)), any_size
        name = _hash_of((model, {key: (one.shape, one.dtype) for key, one in images.items()}, how))
        if options.replace or options.plugin or not name:
            return made()
        if not (file := folder / f"{name}.onnx").exists():
            (part := folder / f"{name}.{os.getpid()}").write_bytes(made().SerializeToString())
            part.rename(file)
        return onnx.load_model_from_string(file.read_bytes())

    return export


def copied(from_torchlib):
    """`from_torchlib`, which makes torch's table of translations for each export: returns a copy of the first table."""
    once = functools.cache(from_torchlib)

    def table(**how):
        made = copy.copy(once(**how))
        made.functions = {name: list(translations) for name, translations in made.functions.items()}
        return made

    return staticmethod(table)
