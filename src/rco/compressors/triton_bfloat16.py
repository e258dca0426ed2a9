"""The GPU kernels of :mod:`rco.compressors.triton_kernels` for what a search meets: bfloat16, regular shapes.

Where columns fill whole segments of 128, the matrix is one flat run of segments and needs no rows, columns or
masks. A thread takes eight neighbouring columns (an *octet*, ``bits`` bytes of codes). Two codes at a time are
written into the low bits of a pair of bfloat16 numbers 128 + code, so that one subtraction and one product decode
both, rounded exactly as a checkpoint decodes; that is half of the instructions that float32 takes, and these
kernels are bound by instructions as much as by memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rco.compressors.triton_kernels import DENSE, Operand, multiprocessors

__all__ = ["decode", "inner_products", "serves"]

SEGMENT = 128
_OCTETS = SEGMENT // 8
_COUNT = 8  # segments of one step of a program: one octet per thread
_WARPS = 4
_PROGRAMS_PER_CORE = 12
_REGISTERS = 80  # per thread: more and too few programs run beside each other to keep the memory busy

# Registers of the assembly below: $G inputs that the caller numbers, named ones declared in the block.
_SPLIT = {
    1: "shr.u32 q0, {low}, {at}; shr.u32 q1, q0, 4;",
    2: "shr.u32 q0, {low}, {at}; shr.u32 q1, q0, 8;",
    3: "shf.r.wrap.b32 q0, {low}, {middle}, {at}; shr.u32 q1, q0, 12;",
    4: "mov.b32 q0, {low}; shr.u32 q1, q0, 16;",
    5: "shf.r.wrap.b32 q0, {low}, {middle}, {at}; add.u32 s, {at}, 20; setp.lt.u32 p, s, 32;"
    " selp.b32 x, {low}, {middle}, p; shf.r.wrap.b32 q1, x, {middle}, s;",
    6: "shf.r.wrap.b32 q0, {low}, {middle}, {at}; add.u32 s, {at}, 24; setp.lt.u32 p, s, 32;"
    " selp.b32 x, {low}, {middle}, p; shf.r.wrap.b32 q1, x, {middle}, s;",
    7: "shf.r.wrap.b32 q0, {low}, {middle}, {at}; add.u32 s, {at}, 28; setp.lt.u32 p, s, 32;"
    " selp.b32 x, {low}, {middle}, p; selp.b32 y, {middle}, {high}, p; shf.r.wrap.b32 q1, x, y, s;",
    8: "mov.b32 q0, {low}; mov.b32 q1, {middle};",
}


def _decoded_pairs(bits: int, zero: str, scale: str) -> str:
    """Assembly that turns the quads q0 and q1 into four pairs of bfloat16 values w0 to w3."""
    lines = []
    for pair in range(4):
        quad, first = f"q{pair // 2}", 2 * (pair % 2)
        if bits == 8:
            # Bytes of 2^23 + code in float32: eight bits are one too many for the trick with bfloat16.
            lines.append(f"prmt.b32 t, {quad}, 0x4B000000, 0x754{first}; mov.b32 a, t;")
            lines.append(f"prmt.b32 t, {quad}, 0x4B000000, 0x754{first + 1}; mov.b32 b, t;")
            lines.append(f"mov.b32 c, {zero}; sub.rn.f32 a, a, c; sub.rn.f32 b, b, c;")
            lines.append(f"mov.b32 c, {scale}; mul.rn.f32 a, a, c; mul.rn.f32 b, b, c;")
            lines.append(f"cvt.rn.bf16x2.f32 w{pair}, b, a;")
            continue
        mask = (1 << bits) - 1
        source = quad
        if first:
            lines.append(f"shr.u32 x, {quad}, {2 * bits};")
            source = "x"
        lines.append(f"and.b32 t, {source}, {mask}; shl.b32 u, {source}, {16 - bits};")
        lines.append(f"and.b32 u, u, {mask << 16}; or.b32 t, t, u; or.b32 t, t, 0x43004300;")
        lines.append(f"fma.rn.bf16x2 t, t, one, {zero};")
        lines.append(f"fma.rn.bf16x2 w{pair}, t, {scale}, none;")
    return "\n".join(lines)


_DECLARATIONS = """
.reg .b32 q0, q1, s, t, u, x, y, w0, w1, w2, w3, g0, g1, g2, g3, one, none;
.reg .f32 a, b, c, sum;
.reg .pred p;
mov.b32 one, 0x3F803F80;
mov.b32 none, 0x80008000;
"""


def _decode_assembly(bits: int) -> str:
    """Eight values as two words of 64 bits, from (low, middle, high, offset, zero, scale)."""
    split = _SPLIT[bits].format(low="$2", middle="$3", high="$4", at="$5")
    pairs = _decoded_pairs(bits, "$6", "$7")
    return f"{{{_DECLARATIONS}{split}\n{pairs}\nmov.b64 $0, {{w0, w1}};\nmov.b64 $1, {{w2, w3}};\n}}"


def _dot_assembly(bits: int) -> str:
    """A running sum plus eight products, from (sum, gradient x 2, low, middle, high, offset, zero, scale)."""
    if bits == DENSE:
        fetch = "mov.b64 {w0, w1}, $4;\nmov.b64 {w2, w3}, $5;"
    else:
        fetch = _SPLIT[bits].format(low="$4", middle="$5", high="$6", at="$7")
        fetch += "\n" + _decoded_pairs(bits, "$8", "$9")
    lines = ["mov.b64 {g0, g1}, $2;", "mov.b64 {g2, g3}, $3;", "mov.f32 sum, $1;"]
    for pair in range(4):
        lines.append(f"shl.b32 t, g{pair}, 16; mov.b32 a, t; shl.b32 u, w{pair}, 16; mov.b32 b, u;")
        lines.append("fma.rn.f32 sum, a, b, sum;")
        lines.append(f"and.b32 t, g{pair}, 0xFFFF0000; mov.b32 a, t;")
        lines.append(f"and.b32 u, w{pair}, 0xFFFF0000; mov.b32 b, u; fma.rn.f32 sum, a, b, sum;")
    return f"{{{_DECLARATIONS}{fetch}\n" + "\n".join(lines) + "\nmov.f32 $0, sum;\n}"


# By width, so that a kernel finds its own.
_DECODE = tl.constexpr(tuple(_decode_assembly(bits) if bits in _SPLIT else "" for bits in range(9)))
_DOT = tl.constexpr(
    tuple(_dot_assembly(bits) if bits in (*_SPLIT, DENSE) else "" for bits in range(DENSE + 1))
)


@triton.jit
def _words(codes, index, octet, BITS: tl.constexpr, OCTETS: tl.constexpr):
    """The words that hold an octet's codes, and the bit of the first at which they start."""
    bit = octet * (8 * BITS)
    word = bit >> 5
    last = (bit + 8 * BITS - 1) >> 5  # never read past the octet, so never past the matrix
    base = codes + index.to(tl.int64) * (OCTETS * BITS // 4)
    low = tl.load(base + word)
    middle = low
    high = low
    if BITS == 3 or BITS > 4:
        middle = tl.load(base + tl.minimum(word + 1, last))
    if BITS == 7:
        high = tl.load(base + tl.minimum(word + 2, last))
    return low, middle, high, bit & 31


@triton.jit
def _scale_and_zero(
    scales, zeros, index, RATIO: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr
):  # fmt: skip
    """Scale and negative zero point in the form that the assembly takes."""
    place = index // RATIO
    scale = tl.load(scales + place).to(tl.uint16, bitcast=True).to(tl.uint32)
    if SYMMETRIC:
        zero = tl.full(scale.shape, 1 << (BITS - 1), tl.uint32)
    else:
        zero = tl.load(zeros + place).to(tl.uint32)
    if BITS == 8:
        return scale << 16, zero | 0x4B000000
    # Twice in one word; the zero point as -(128 + zero).
    return scale | (scale << 16), (zero | (zero << 16)) | 0xC300C300


@triton.jit
def _decode_kernel(
    codes, scales, zeros, out, segments,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, RATIO: tl.constexpr,
    COUNT: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)[:, None]
    octet = tl.arange(0, OCTETS)[None, :]
    inside = index < segments
    index = tl.minimum(index, segments - 1)
    low, middle, high, offset = _words(codes, index, octet, BITS, OCTETS)
    scale, zero = _scale_and_zero(scales, zeros, index, RATIO, BITS, SYMMETRIC)
    first, second = tl.inline_asm_elementwise(
        _DECODE[BITS], "=l,=l,r,r,r,r,r,r", [low, middle, high, offset, zero, scale],
        dtype=(tl.int64, tl.int64), is_pure=True, pack=1,
    )  # fmt: skip
    place = (index.to(tl.int64) * (2 * OCTETS) + 2 * octet)[:, :, None] + tl.arange(0, 2)[None, None, :]
    tl.store(out + place, tl.join(first, second), mask=inside[:, :, None])


@triton.jit
def _inner_products_kernel(
    gradient, table, partial, segments, steps,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, RATIO: tl.constexpr,
    COUNT: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    octet = tl.arange(0, OCTETS)[None, :]
    codes, scales, zeros, sums = (), (), (), ()
    for k in tl.static_range(len(BITS)):
        words = tl.pointer_type(tl.int64 if BITS[k] == 16 else tl.int32)
        codes = codes + (tl.load(table + 3 * k).to(words),)
        scales = scales + (tl.load(table + 3 * k + 1).to(tl.pointer_type(tl.bfloat16)),)
        zeros = zeros + (tl.load(table + 3 * k + 2).to(tl.pointer_type(tl.uint8)),)
        sums = sums + (tl.zeros((COUNT, OCTETS), tl.float32),)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        index = step * COUNT + tl.arange(0, COUNT)[:, None]
        inside = index < segments
        index = tl.minimum(index, segments - 1) + tl.program_id(1) * segments
        place = index.to(tl.int64) * (2 * OCTETS) + 2 * octet
        first = tl.load(gradient + place, mask=inside, other=0)
        second = tl.load(gradient + place + 1, mask=inside, other=0)
        added = ()
        for k in tl.static_range(len(BITS)):
            if BITS[k] == 16:
                added = added + (
                    tl.inline_asm_elementwise(
                        _DOT[BITS[k]], "=f,f,l,l,l,l",
                        [sums[k], first, second, tl.load(codes[k] + place), tl.load(codes[k] + place + 1)],
                        dtype=tl.float32, is_pure=True, pack=1,
                    ),
                )  # fmt: skip
            else:
                low, middle, high, offset = _words(codes[k], index, octet, BITS[k], OCTETS)
                scale, zero = _scale_and_zero(scales[k], zeros[k], index, RATIO, BITS[k], SYMMETRIC[k])
                added = added + (
                    tl.inline_asm_elementwise(
                        _DOT[BITS[k]], "=f,f,l,l,r,r,r,r,r,r",
                        [sums[k], first, second, low, middle, high, offset, zero, scale],
                        dtype=tl.float32, is_pure=True, pack=1,
                    ),
                )  # fmt: skip
        sums = added
    target = partial + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * len(BITS)
    for k in tl.static_range(len(BITS)):
        tl.store(target + k, tl.sum(tl.sum(sums[k], axis=1), axis=0))


def serves(tensor: Tensor, operands: Sequence[Operand], group: int) -> bool:
    """Whether a bfloat16 matrix (gradient or decoded weight) and its options are of regular shape."""
    rows, cols = tensor.shape
    regular = cols % SEGMENT == 0 and (group % SEGMENT == 0 or group >= cols) and rows * cols < 2**37
    return regular and all(
        part.dtype == torch.bfloat16 and part.is_contiguous() and part.data_ptr() % 16 == 0
        for part in (tensor, *(o.codes if o.bits == DENSE else o.scales for o in operands))
    )


def decode(operand: Operand, group: int, out: Tensor) -> None:
    """Write the decoded matrix to ``out``."""
    segments = out.numel() // SEGMENT
    _decode_kernel[(triton.cdiv(segments, _COUNT),)](
        operand.codes, operand.scales, operand.scales if operand.zeros is None else operand.zeros,
        out.view(torch.int64), segments,
        BITS=operand.bits, SYMMETRIC=operand.zeros is None, RATIO=min(group, out.shape[1]) // SEGMENT,
        COUNT=_COUNT, OCTETS=_OCTETS, num_warps=_WARPS,
    )  # fmt: skip


def inner_products(gradient: Tensor, operands: Sequence[Operand], group: int, parts: int) -> Tensor:
    """(K, parts) products of each part of the rows with every operand, float64."""
    segments = gradient.numel() // SEGMENT // parts
    steps = triton.cdiv(segments, _COUNT)
    programs = min(steps, max(1, _PROGRAMS_PER_CORE * multiprocessors(gradient.device) // parts))
    partial = torch.empty(parts, programs, len(operands), dtype=torch.float32, device=gradient.device)
    addresses = tuple(
        (operand.scales if part is None else part).data_ptr()
        for operand in operands
        for part in (operand.codes, operand.scales, operand.zeros)
    )
    _inner_products_kernel[(programs, parts)](
        gradient.view(torch.int64), _table(addresses, gradient.device), partial, segments, steps,
        BITS=tuple(operand.bits for operand in operands),
        SYMMETRIC=tuple(operand.zeros is None for operand in operands),
        RATIO=min(group, gradient.shape[1]) // SEGMENT,
        COUNT=_COUNT, OCTETS=_OCTETS, num_warps=_WARPS, maxnreg=_REGISTERS,
    )  # fmt: skip
    return partial.sum(dim=1, dtype=torch.float64).T


@lru_cache(maxsize=8192)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the operands are, on the device: one argument of a launch instead of three per option.

    A launch examines each of its arguments, which for 21 tensors takes longer than most layers compute.
    """
    return torch.tensor(addresses, dtype=torch.int64, device=device)
