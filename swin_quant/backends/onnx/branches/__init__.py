"""Captured networks as exported: the branches of their blocks, found by pattern, as one operator each."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from swin_quant.backends.onnx.branches.mlp import NO_MLP, mlp_branch, mlps
from swin_quant.backends.onnx.branches.tokens import NO_ATTENTION, attentions, token_branch_at
from swin_quant.backends.onnx.network import Rewriter, as_it_is
from swin_quant.models.captured import graphs, run_graph


@dataclass(frozen=True)
class BranchRewrite:
    """Lets branches of a captured network call a plugin's operator.

    `at`: (module, addition in its graph) -> the `MlpBranch` or `TokenBranch` that ends there, or None.
    `count`: (module, graph) -> the parts of the kind, whatever stands around them, by the reason why one is no branch.
    `alone`: that reason, of parts that only lack what stands around a branch.
    """

    at: Callable[[nn.Module, fx.Node], Any]
    count: Callable[[nn.Module, fx.Graph], Counter[str]]
    alone: str

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

    def find_left(self, model: nn.Module, is_compiled: bool) -> Counter[str]:
        """The parts that stayed plain nodes, by the reason; `is_compiled`: whether others are compiled."""
        fits = "has another form than the compiled ones" if is_compiled else "could be compiled"
        found = Counter[str]()
        for part, graph in graphs(model):
            branches = [branch for node in graph.nodes if (branch := self.at(part, node))]
            faults = [branch.fault or ("" if branch.is_fast else "has no fast loops") for branch in branches]
            found += self.count(part, graph)
            found[self.alone] -= len(branches)
            found.update((fault or fits).partition(":")[0] for fault in faults)
        return +found


def call_operator(part: nn.Module, graph: fx.Graph, branch: Any, operator: str) -> None:
    """Call a module that computes a branch in its place."""
    owner = part.get_submodule(branch.owner)
    own = next(name for name in (operator + "_" * number for number in range(1, 99)) if not hasattr(owner, name))
    owner.add_module(own, branch.operator())
    with graph.inserting_before(branch.addition):
        made = graph.call_module(f"{branch.owner}.{own}".lstrip("."), (branch.stream,))
    made.meta = dict(branch.addition.meta)
    branch.addition.replace_all_uses_with(made)


BRANCHES = {
    "token_branch": BranchRewrite(token_branch_at, attentions, NO_ATTENTION),
    "mlp": BranchRewrite(mlp_branch, mlps, NO_MLP),
}


def find_left(model: nn.Module) -> dict[str, Counter[str]]:
    """Why parts stayed plain nodes, and how many, by the operator that may compute their branches."""
    compiled = {getattr(module, "operator", None) for module in model.modules()}
    return {name: one.find_left(model, name in compiled) for name, one in BRANCHES.items()}


REWRITER = Rewriter({}, as_it_is, plugins=BRANCHES, find_left=find_left, measured_as="vit")
