"""How near the candidates of `--serve llamacpp` come to what llama.cpp makes of the same weights.

    pip install gguf xllamacpp          # any library that exports ggml_quantize_chunk will do
    python benchmarks/gguf_candidates.py --library .../xllamacpp/xllamacpp.abi3.so

For every linear and every type that fits its rows: squared error relative to the weights, of rco's grid (rounded to
nearest, as `--method rtn`) and of llama.cpp's own quantizer without an importance matrix, decoded by the gguf
package. A search ranks options by what they do, so the ratios should be near one and alike across types.
"""

import argparse
import ctypes
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--out", type=Path, default=RESULTS / "gguf_candidates.json")
    arguments = parser.parse_args()

    from rco.compression.llama_quantize import GGUF_WIDTHS, GGUFFile
    from rco.formats.rounding import round_to_nearest
    from rco.models.loading import load_model
    from rco.runs import environment, write_json_atomic

    llama_cpp = Quantizer(arguments.library)
    loaded = load_model(arguments.model)
    file = GGUFFile.of(loaded.layout, loaded.model)
    errors: dict[str, list[tuple[float, float]]] = {}
    for info in loaded.layout.linears(loaded.model):
        weight = info.weight.detach().float().contiguous()
        size = float(weight.double().square().sum())
        for width in GGUF_WIDTHS:
            kind = file.type_of(info, width)
            if kind is None:
                continue
            grid = kind.scheme
            (packed,) = round_to_nearest(weight, [grid], storage_dtype=loaded.dtype)
            ours = float((packed.dequantize(torch.float32) - weight).double().square().sum())
            theirs = float((llama_cpp(weight, kind.name) - weight).double().square().sum())
            errors.setdefault(kind.name, []).append((ours / size, theirs / size))
    rows = []
    for kind, pairs in errors.items():
        ours, theirs = np.array(pairs).T
        ratios = ours / theirs
        rows.append(
            {
                "type": kind,
                "linears": len(pairs),
                "rco": float(ours.mean()),
                "llama.cpp": float(theirs.mean()),
                "ratio": float(ours.mean() / theirs.mean()),
                "ratio_of_linears": [float(ratios.min()), float(np.median(ratios)), float(ratios.max())],
            }
        )
        print(f"{kind:6} {rows[-1]['rco']:.3e} {rows[-1]['llama.cpp']:.3e} {rows[-1]['ratio']:.3f}")
    write_json_atomic(
        arguments.out,
        {
            "model": arguments.model,
            "library": arguments.library.name,
            "types": rows,
            "environment": environment(),
        },
    )


class Quantizer:
    """llama.cpp's quantizer, from a shared library, and the gguf package's decoder."""

    def __init__(self, library: Path) -> None:
        import gguf

        self.gguf = gguf
        loaded = ctypes.CDLL(str(library))
        self.chunk = loaded.ggml_quantize_chunk
        self.chunk.restype = ctypes.c_size_t
        self.chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_void_p,
        ]  # fmt: skip

    def __call__(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        """A float32 matrix after a round trip through a type."""
        kind = self.gguf.GGMLQuantizationType[name.upper()]
        rows, columns = weight.shape
        source = weight.numpy()
        width = self.gguf.quant_shape_to_byte_shape((columns,), kind)[0]
        stored = np.zeros((rows, width), dtype=np.uint8)
        written = self.chunk(int(kind), source.ctypes.data, stored.ctypes.data, 0, rows, columns, None)
        if written != stored.nbytes:
            raise RuntimeError(f"{name}: {written} bytes were written, {stored.nbytes} expected.")
        return torch.from_numpy(self.gguf.dequantize(stored, kind))


if __name__ == "__main__":
    main()
