"""Plant products with a channel far from the others in a Swin V1, which no rescaling of inputs or weights cures."""

import torch
from torch.nn.functional import gelu


@torch.no_grad()
def plant_in_mlp(mlp, hidden, share):
    """Make the least important `share` of the hidden units constant, and let them feed the first channel of fc2.

    `hidden` [tokens, units]: fc2's input. Its bias subtracts the constant: only those units are lost.
    """
    fc1, fc2 = mlp.fc1, mlp.fc2
    matters = hidden.std(0) * fc2.weight.norm(dim=0)
    at = matters.argsort()[: max(1, round(share * len(matters)))]
    fc2.bias += fc2.weight[:, at] @ hidden.mean(0)[at]
    fc1.weight[at], fc2.weight[:, at] = 0.0, 0.0
    fc1.bias[at] = hidden.abs().max()
    fc2.weight[0, at] = fc2.weight.abs().max()
    fc2.bias[0] -= fc2.weight[0, at] @ gelu(fc1.bias[at])


@torch.no_grad()
def plant_in_merging(merging, block, product, times):
    """Make the least varying channel of a patch merging's product constant, `times` the largest magnitude.

    `product` [tokens, channels]: the reduction's output; `block`: the one after it. A row of one over the norm's gains
    sums normalised values to zero; a bias of the norm that no other row sees then adds the constant. The block's norm
    sees it in the residual stream and is fitted to that, a line a channel; its projection subtracts it.
    """
    norm, weight = merging.norm, merging.reduction.weight
    at = int(product.std(0).argmin())
    row = 1 / norm.weight
    row *= weight.abs().max() / row.abs().max()
    others, _ = torch.linalg.qr(torch.cat([weight[:at], weight[at + 1 :]]).double().T)
    alone = (row.double() - others @ (others.T @ row.double())).float()
    constant = times * product.abs().max()
    norm.bias += alone * (constant - row @ norm.bias) / (row @ alone)
    weight[at] = row
    planted = product.clone()
    planted[:, at] = constant
    was, now = (torch.nn.functional.layer_norm(x, x.shape[1:]) for x in (product, planted))
    slope = ((was - was.mean(0)) * (now - now.mean(0))).mean(0) / now.var(0, unbiased=False).clamp_min(1e-12)
    slope[at] = 0.0
    block.norm1.bias += block.norm1.weight * (was.mean(0) - slope * now.mean(0))
    block.norm1.weight *= slope
    block.attn.proj.bias[at] += product[:, at].mean() - constant
