"""ggml's own quantizers, from the shared library of the package libggml-python."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rco.formats.integer_kernels_cpu import over_rows
from rco.requirements import MissingPackageError, require

__all__ = ["quantize"]

_NAMES = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")
_WORK = 64  # a weight takes about as long as that many elements of other row jobs


@cache
def _library() -> Any:
    require("libggml-python", "Encoding ggml types")
    spec = find_spec("libggml")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    files = [path for folder in folders for name in _NAMES for path in Path(folder).rglob(name)]
    if not files:
        raise MissingPackageError(
            "The installed libggml-python has no library libggml-base: run pip install --force-reinstall "
            "libggml-python."
        )
    library = ctypes.CDLL(str(files[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
        ctypes.c_void_p,
    ]  # fmt: skip
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    return library


def quantize(number: int, weight: Tensor, importance: Tensor | None) -> Tensor:
    """The blocks of a weight, uint8 (rows, bytes), row by row and on as many threads as torch is set to use.

    Args:
        number: ggml's number of the type.
        weight: (rows, columns), columns a multiple of the block.
        importance: (columns,) weights of the columns' squared errors; None if the type works without.

    Raises:
        MissingPackageError: libggml-python is not installed.
    """
    library = _library()
    source: NDArray[np.float32] = weight.detach().to("cpu", torch.float32).contiguous().numpy()
    rows, columns = source.shape
    if not np.isfinite(source).all():
        raise ValueError(
            "The weight holds NaN or infinite values, which ggml cannot encode; check the model."
        )
    weights = None
    if importance is not None:
        weights = importance.detach().to("cpu", torch.float32).contiguous().numpy()
        if weights.shape != (columns,) or not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(
                f"Importances must be {columns} finite numbers that are not negative, got {weights.shape}."
            )
    library.ggml_quantize_init(number)
    size = int(library.ggml_row_size(number, columns))
    out = np.zeros((rows, size), dtype=np.uint8)

    def task(start: int, stop: int) -> None:
        written = library.ggml_quantize_chunk(
            number,
            source[start:stop].ctypes.data,
            out[start:stop].ctypes.data,
            0,
            stop - start,
            columns,
            None if weights is None else weights.ctypes.data,
        )
        if written != (stop - start) * size:
            raise RuntimeError(
                f"ggml wrote {written} bytes instead of {(stop - start) * size}; its version does not match "
                "this package. Please report this."
            )

    # Ranges of about a megabyte, so that threads end together.
    over_rows(rows, columns * _WORK, task, row_bytes=columns * 4)
    return torch.from_numpy(out).to(weight.device)
