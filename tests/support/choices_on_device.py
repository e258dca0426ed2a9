"""In place of a GPU's kernel that decodes the option whose number is on the device."""

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def decoder_by_place(options, dtype):
    """For ``LayerOptions.chosen_decoder``: decodes by torch operations, none of which asks for the number."""
    listed = [o.to(dtype) if isinstance(o, torch.Tensor) else o.dequantize(dtype) for o in options.listed]
    dense = torch.stack(listed).unflatten(1, (options.parts, -1))  # (options, parts, rows of a part, columns)

    def decode(places, out):
        index = places.reshape(1, -1, 1, 1).expand(1, *dense.shape[1:])
        out.copy_(dense.gather(0, index)[0].flatten(0, 1))

    return decode
