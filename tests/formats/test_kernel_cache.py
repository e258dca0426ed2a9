"""Kernels from numba's cache, written by several processes, are the kernels that were compiled."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy as np
import torch
from rco.formats import integer_kernels_cpu as kernels
from rco.formats.integer import pack

def packed(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, size=(4, 32)).astype(np.uint8)
    words = pack(torch.from_numpy(codes), bits)
    return codes, words.numpy().view(np.uint8)

for name in sys.argv[1:]:
    # Widths of the scales in bytes; two are the patterns of bfloat16, whose gradients are float32.
    kind, number = name[0], {"2": np.float32, "4": np.float32, "8": np.float64}[name[1]]
    for bits in range(1, 9):
        codes, stream = packed(bits)
        scales, zeros = np.ones((4, 1), number), np.zeros((4, 1), np.uint8)
        none = np.empty((4, 0), np.float32), np.empty(0, np.float32)
        if name[1] == "2":
            scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
        if kind == "u":
            got = np.empty_like(codes)
            kernels.unpack_rows(stream, bits, got)
            assert (got == codes).all(), name
        elif kind == "d":
            values = np.empty(codes.shape, number)
            kernels.decode_float_at(stream, bits, scales, zeros, *none, 32, 0, np.arange(4), values)
            assert (values == codes).all(), name
        else:
            sums = np.zeros(4)
            kernels.dot_float(np.ones(codes.shape, number), stream, bits, scales, zeros, *none, 32, 0, sums)
            assert (sums == codes.sum(1)).all(), name
"""


@pytest.mark.slow
def test_cached_kernels_do_not_take_each_others_place(tmp_path):
    # Each process compiles some kernels; compiled code is linked by name, and names are counted per process.
    for wanted in (
        ["u4", "d2"],
        ["p4", "d8"],
        ["d4", "p8", "p2"],
        ["u4", "d2", "d4", "d8", "p2", "p4", "p8"],
        ["p8", "d4", "u4"],
    ):
        subprocess.run(
            [sys.executable, "-c", SCRIPT, *wanted],
            check=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            timeout=300,
        )
