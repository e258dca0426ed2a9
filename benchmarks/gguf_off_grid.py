"""A reference for comparisons from a quantized GGUF file: bf16 weights off the grid of the file's types.

    python benchmarks/gguf_off_grid.py model-Q4_K_M.gguf reference.gguf

Decoded weights of a quantized file lie on the grid of its types, so that encoding them in the same type again costs
nothing, and any comparison of types favours it. To every weight of a quantized tensor this adds uniform noise as
wide as the quantization step around it (the smallest gap between the values of its block of 32), like the rounding
error that the file has lost. The result is a full-precision model of the same shape and statistics, no longer the
published one.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

_ROWS = 4096  # decoded at a time
_BLOCK = 32


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where it is computed; another device, other noise")
    arguments = parser.parse_args()
    written = write_off_grid(arguments.source, arguments.target, arguments.seed, arguments.device)
    print(f"{written:,} bytes")


def write_off_grid(source, target, seed=0, device="cpu"):
    """Write the reference of a file; returns its bytes."""
    from rco.formats.ggml.block_types import BLOCK_TYPES
    from rco.models.gguf_file import TYPE_NUMBERS, GGUFReader, TensorEntry, encoded_value, write_gguf

    reader, generator = GGUFReader(source), torch.Generator(device).manual_seed(seed)
    tensors = []
    for name, entry in reader.tensors.items():
        if entry.type_name in BLOCK_TYPES:
            stored = TensorEntry(name, entry.shape, TYPE_NUMBERS["bf16"])
            tensors.append((stored, partial(_noisy, reader, name, generator)))
        else:
            tensors.append((entry, partial(reader.data, name)))
    metadata = reader.metadata.with_values({"general.file_type": encoded_value(32)})
    return write_gguf(target, metadata, tensors, reader.alignment)


def _noisy(reader, name, generator):
    entry = reader.tensors[name]
    out = torch.empty(entry.rows, entry.columns, dtype=torch.bfloat16)
    for start in range(0, entry.rows, _ROWS):
        places = torch.arange(start, min(start + _ROWS, entry.rows))
        block = reader.decode_rows(name, places, generator.device).unflatten(-1, (-1, _BLOCK))
        gaps = block.sort(-1).values.diff(dim=-1)
        step = torch.where(gaps > 0, gaps, torch.inf).amin(-1, keepdim=True)
        noise = torch.rand(block.shape, generator=generator, device=block.device) - 0.5
        noise *= torch.where(step.isinf(), 0.0, step)
        out[places] = (block + noise).flatten(-2).bfloat16().cpu()
    return memoryview(out.view(torch.uint8).numpy())


if __name__ == "__main__":
    main()
