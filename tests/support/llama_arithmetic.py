"""llama.cpp's rounding of activations on a CPU, in a model of transformers.

Before a product with a quantized weight, llama.cpp rounds the other operand to 8 bits: in blocks of 32 with a scale
in float16 (its types Q8_0 and Q8_1), or in blocks of 256 with one in float32 (Q8_K), by the weight's type.
For a weight in float16 or bfloat16 it rounds to that type. Attention takes queries, keys, values and probabilities
in float16.
"""

from contextlib import contextmanager

import torch
from transformers import AttentionInterface

_BLOCKS_OF_32 = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")
_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def rounded(inputs, kind):
    """Inputs of a product with a weight of a type."""
    if kind in _FLOATS:
        return inputs.to(_FLOATS[kind]).to(inputs.dtype)
    block = 32 if kind in _BLOCKS_OF_32 else 256
    groups = inputs.unflatten(-1, (-1, block))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0.0).round()
    return (codes * (scale.half().float() if block == 32 else scale)).flatten(-2)


def _attention(module, query, key, value, mask, scaling, **_):
    """Causal attention over whole sequences; the mask is not read."""
    query, key, value = (part.half().float() for part in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    chances = scores.masked_fill(future, -torch.inf).softmax(-1).half().float()
    return (chances @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("llama.cpp", _attention)


@contextmanager
def llama_arithmetic(model, kinds):
    """Compute as llama.cpp does, given the type of every linear's weight in the file."""
    modules, config = dict(model.named_modules()), model.config
    hooks = [
        modules[name].register_forward_pre_hook(lambda _, inputs, kind=kind: (rounded(inputs[0], kind),))
        for name, kind in kinds.items()
    ]
    usual = config._attn_implementation
    config._attn_implementation = "llama.cpp"
    try:
        yield
    finally:
        config._attn_implementation = usual
        for hook in hooks:
            hook.remove()
