"""Where the windows of attention are: among the heads, or in a dimension of their own. The numbers are the same."""

from typing import Any, Protocol

from torch import Tensor


class Layout(Protocol):
    """How the heads of a layer `attn` with `windows` (1 where they are not shifted), `heads` and `length` L lie."""

    def split(self, attn: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        """[..., 3C] -> q, k, v [..., L, D]."""
        ...

    def join(self, attn: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The heads of `split`, back to `shape` [..., C]."""
        ...

    def addend(self, bias: Tensor, mask: Tensor) -> Tensor:
        """What is added to the logits, of bias [heads, L, L] and mask [nW, 1, L, L]."""
        ...


class AsHeads:
    """[B, nW * heads, L, D]: rank 4, which engines fuse, and a constant that needs no batch."""

    def split(self, attn: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        groups, depth = 3 * attn.heads, qkv.shape[-1] // (3 * attn.heads)
        if attn.windows == 1:
            return qkv.view(-1, attn.length, groups, depth).transpose(1, 2).chunk(3, 1)
        x = qkv.view(-1, attn.windows, attn.length, 3, attn.heads, depth).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(-1, groups * attn.windows, attn.length, depth).chunk(3, 1)

    def join(self, attn: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        if attn.windows > 1:
            x = x.view(-1, attn.windows, attn.heads, attn.length, x.shape[-1])
        return x.transpose(-3, -2).reshape(-1, *shape[1:])

    def addend(self, bias: Tensor, mask: Tensor) -> Tensor:
        return (bias + mask).flatten(0, 1)


class Apart:
    """[B, nW, heads, L, D]: for engines that fuse no attention.

    All transpositions are of rank 4 with the last dimension in its place, which is what transposes fast. The view
    between them and the product keeps ONNX Runtime's optimizer from making one of that of k and the one before it, the
    slow one: it goes into the product instead.
    """

    def split(self, attn: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        groups, depth = 3 * attn.heads, qkv.shape[-1] // (3 * attn.heads)
        x = qkv.view(-1, attn.length, groups, depth).transpose(1, 2)
        return x.reshape(-1, attn.windows, groups, attn.length, depth).chunk(3, 2)

    def join(self, attn: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        x = x.reshape(-1, attn.heads, attn.length, x.shape[-1])
        return x.transpose(1, 2).reshape(-1, *shape[1:])

    def addend(self, bias: Tensor, mask: Tensor) -> Tensor:
        return bias + mask
