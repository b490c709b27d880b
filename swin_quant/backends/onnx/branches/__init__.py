"""Captured networks as exported: the branches of their blocks, found by pattern, as one operator each."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from swin_quant.backends.onnx.branches.mlp import mlp_branch, mlps
from swin_quant.backends.onnx.branches.tokens import attentions, token_branch_at
from swin_quant.backends.onnx.network import Rewriter, as_it_is
from swin_quant.models.captured import graphs, run_graph


@dataclass(frozen=True)
class BranchRewrite:
    """Lets branches of a captured network call a plugin's operator.

    `at`: (module, addition in its graph) -> the `MlpBranch` or `TokenBranch` that ends there, or None.
    `count`: (module, graph) -> the number of parts of the kind, whatever stands around them.
    """

    at: Callable[[nn.Module, fx.Node], Any]
    count: Callable[[nn.Module, fx.Graph], int]

    def apply(self, model: nn.Module, plugin: str, is_compiled: Callable[[str], bool] | None = None) -> None:
        """Change all branches that the operator can compute, in place.

        With `is_compiled`, asked where it matters, only those for which the compiled operator is fast.
        """
        found = [(part, graph, self.at(part, node)) for part, graph in graphs(model) for node in graph.nodes]
        found = [one for one in found if one[2] and not one[2].fault and (one[2].is_fast or is_compiled is None)]
        forms = Counter(branch.form for _, _, branch in found)
        if not forms or (is_compiled and not is_compiled(plugin)):
            return
        taken = [one for one in found if one[2].form == forms.most_common(1)[0][0]]
        for part, graph, branch in taken:
            call_operator(part, graph, branch, plugin)
        for part, graph in {id(part): (part, graph) for part, graph, _ in taken}.values():
            run_graph(part, graph)


def call_operator(part: nn.Module, graph: fx.Graph, branch: Any, operator: str) -> None:
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
