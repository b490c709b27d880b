"""Every graph of an ONNX file: the one walk, which goes down into If, Loop and Scan."""

from collections.abc import Iterator
from typing import Any


def scopes(*outermost: Any) -> Iterator[tuple[Any, ...]]:
    """Each graph (or function of the model's own) and each one inside it, behind those that it lies in, which it may
    take tensors from; the outer ones come first."""
    pending: list[tuple[Any, ...]] = [(graph,) for graph in outermost]
    for scope in pending:  # it grows
        yield scope
        for node in scope[-1].node:
            for attribute in node.attribute:  # whatever type it says it is of: engines differ in what they read
                pending += [(*scope, inner) for inner in attribute.graphs]
                pending += [(*scope, attribute.g)] if attribute.HasField("g") else []


def graphs(*outermost: Any) -> Iterator[Any]:
    """Each graph or function, and each graph inside it."""
    return (scope[-1] for scope in scopes(*outermost))


def nodes(*outermost: Any) -> Iterator[Any]:
    """The nodes of all these graphs."""
    return (node for graph in graphs(*outermost) for node in graph.node)
