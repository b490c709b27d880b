"""Captured networks as exported: the branches of their blocks, found by pattern, as one operator each."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import fx, nn

from swin_quant.backends.onnx.branches.mlp import mlp_branch, mlps
from swin_quant.backends.onnx.branches.tokens import attentions, token_branch_at
from swin_quant.backends.onnx.network import Rewriter, as_it_is
from swin_quant.models.captured import graphs, run_graph


class Branch(Protocol):
    """A branch of a block, up from the addition that ends it to the stream that it reads."""

    @property
    def addition(self) -> fx.Node: ...
    @property
    def stream(self) -> fx.Node: ...
    @property
    def owner(self) -> str:
        """The module that gets the operator."""

    @property
    def form(self) -> tuple[object, ...]:
        """The attributes that all nodes of a file share: one ONNX function stands for them."""

    @property
    def fault(self) -> str | None: ...
    @property
    def is_fast(self) -> bool: ...
    def operator(self) -> nn.Module: ...


@dataclass(frozen=True)
class BranchRewrite:
    """Lets branches of a captured network call a plugin's operator.

    `at`: (module, addition in its graph) -> the branch that ends there. `count`: (module, graph) -> the number of parts
    of the kind, whatever stands around them.
    """

    at: Callable[[nn.Module, fx.Node], Branch | None]
    count: Callable[[nn.Module, fx.Graph], int]

    def apply(self, model: nn.Module, plugin: str, is_compiled: Callable[[str], bool] | None = None) -> None:
        """Change all branches that the operator can compute, in place.

        With `is_compiled`, asked where it matters, only those for which the compiled operator is fast.
        """
        places = [(part, graph, self._able(part, graph, is_compiled is not None)) for part, graph in graphs(model)]
        forms = Counter(branch.form for _, _, branches in places for branch in branches)
        if not forms or (is_compiled and not is_compiled(plugin)):
            return
        for part, graph, branches in places:
            taken = [branch for branch in branches if branch.form == forms.most_common(1)[0][0]]
            for branch in taken:
                call_operator(part, graph, branch, plugin)
            if taken:
                run_graph(part, graph)

    def _able(self, part: nn.Module, graph: fx.Graph, is_fast: bool) -> list[Branch]:
        found = [branch for node in graph.nodes if (branch := self.at(part, node))]
        return [branch for branch in found if not branch.fault and (branch.is_fast or not is_fast)]


def call_operator(part: nn.Module, graph: fx.Graph, branch: Branch, operator: str) -> None:
    """Call a module that computes a branch in its place."""
    owner = part.get_submodule(branch.owner)
    own = next(name for name in (operator + "_" * number for number in range(1, 99)) if not hasattr(owner, name))
    owner.add_module(own, branch.operator())
    with graph.inserting_before(branch.addition):
        made = graph.call_module(f"{branch.owner}.{own}".lstrip("."), (branch.stream,))
    made.meta = dict(branch.addition.meta)
    branch.addition.replace_all_uses_with(made)


BRANCHES = {"token_branch": BranchRewrite(token_branch_at, attentions), "mlp": BranchRewrite(mlp_branch, mlps)}


def counted(model: nn.Module) -> dict[str, int]:
    """The number of parts of each kind, by the operator that may compute their branches."""
    return {name: sum(one.count(part, graph) for part, graph in graphs(model)) for name, one in BRANCHES.items()}


REWRITER = Rewriter({}, as_it_is, plugins=BRANCHES, counted=counted, measured_as="vit")
