"""Plant outlier channels in a network without changing its float function: the stress of equalization."""

import torch


def _chosen(channels, share, generator):
    count = max(1, round(share * channels))
    return torch.randperm(channels, generator=generator)[:count]


@torch.no_grad()
def plant(model, where, scale, share=0.03, seed=0):
    """Make `share` of the channels `scale` times as large, and the weights that read them as much smaller; in place.

    `where`: norms (before qkv, fc1 and patch merging's reduction), v (against proj), qk (q against k); in V2, v, heads
    (q and k of one whole head, whose length cosine attention removes) and stream (the sources of the first stage's
    residual stream, against its readers). Returns the model.
    """
    generator = torch.Generator().manual_seed(seed)
    if where == "stream":
        _plant_in_stream(model, scale, share, generator)
    for module in model.modules():
        readers = [(getattr(module, norm, None), reader(module)) for norm, reader in _READERS if where == "norms"]
        for norm, linear in readers:
            if norm is not None and linear is not None and linear.in_features == len(norm.weight):
                at = _chosen(len(norm.weight), share, generator)
                norm.weight[at] *= scale
                norm.bias[at] *= scale
                linear.weight[:, at] /= scale
        if hasattr(module, "qkv"):
            _plant_in_attention(module, where, scale, share, generator)
    return model


_READERS = (
    ("norm1", lambda block: block.attn.qkv if block.__class__.__name__ == "SwinBlock" else None),
    ("norm2", lambda block: block.mlp.fc1 if block.__class__.__name__ == "SwinBlock" else None),
    ("norm", lambda merging: getattr(merging, "reduction", None)),
)


def _plant_in_stream(model, scale, share, generator):
    stage = model.layers[0]
    dim = model.patch_embed.norm.weight.shape[0]
    at = _chosen(dim, share, generator)
    for norm in (model.patch_embed.norm, *(norm for block in stage.blocks for norm in (block.norm1, block.norm2))):
        norm.weight[at] *= scale
        norm.bias[at] *= scale
    for linear in (linear for block in stage.blocks for linear in (block.attn.qkv, block.mlp.fc1)):
        linear.weight[:, at] /= scale
    for neighbour in range(4):
        stage.downsample.reduction.weight[:, neighbour * dim + at] /= scale


def _plant_in_attention(attn, where, scale, share, generator):
    weight, dim = attn.qkv.weight, attn.qkv.weight.shape[0] // 3
    biases = {part: bias for part, bias in zip("qkv", _biases(attn, dim), strict=True) if bias is not None}
    rows = dict(zip("qkv", weight.split(dim), strict=True))

    def times(part, at, factor):
        rows[part][at] *= factor
        if part in biases:
            biases[part][at] *= factor

    at = _chosen(dim, share, generator)
    if where == "v":
        times("v", at, scale)
        attn.proj.weight[:, at] /= scale
    elif where == "qk":
        times("q", at, scale)
        times("k", at, 1 / scale)
    elif where == "heads":
        size = dim // attn.heads
        head = int(torch.randint(attn.heads, (), generator=generator))
        for part in "qk":
            times(part, slice(head * size, (head + 1) * size), scale)


def _biases(attn, dim):
    """The biases of q, k and v: V2 keeps its own beside the layer, and has none for k."""
    if hasattr(attn, "q_bias"):
        return attn.q_bias, None, attn.v_bias
    return attn.qkv.bias.split(dim) if attn.qkv.bias is not None else (None, None, None)
