"""The GPU kernels of :mod:`rco.formats.integer_kernels_triton` for bfloat16 and regular shapes.

These are the usual case of a search. If rows and groups are whole runs of columns (of 128 to decode, of 32 for
inner products), the matrix is one flat run and needs no rows, columns or masks. Two codes at a time are written
into the low bits of a pair of bfloat16 numbers 128 + code, so that one subtraction and one product decode both,
rounded exactly as a checkpoint decodes. That takes half of float32's instructions, and these kernels are bound by
instructions as much as by memory.

To decode, a thread takes eight neighbouring columns (an *octet*, ``bits`` bytes of codes), which it writes at
once. For inner products it takes 32 (a *unit*, ``bits`` whole words), whose codes lie at fixed positions in their
words: no shift is by a variable amount, and a scale is loaded once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rco.formats.integer_kernels_triton import DENSE, Operand, multiprocessors, over_programs, partial_sums
from rco.formats.launching import launching_at

__all__ = ["chosen_decoder", "decoder", "decodes", "decodes_parts", "multiplier", "multiplies"]

SEGMENT = 128
_OCTETS = SEGMENT // 8
_UNIT = 32
_WARPS = 4
_DECODE_COUNT = 8  # segments of one step of a program: one octet per thread
_DOT_COUNT = 128  # units of one step of a program: one per thread
_PROGRAMS_PER_CORE = 6
_REGISTERS: int | None = None  # per thread; None: chosen by the compiler

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


def _pair(bits: int, source: str, target: str, zero: str, scale: str) -> str:
    """Assembly that decodes the two codes in the low bits of a register to a pair of bfloat16 values."""
    mask = (1 << bits) - 1
    return (
        f"and.b32 t, {source}, {mask}; shl.b32 u, {source}, {16 - bits}; and.b32 u, u, {mask << 16};"
        f" or.b32 t, t, u; or.b32 t, t, 0x43004300;"
        f" fma.rn.bf16x2 t, t, one, {zero}; fma.rn.bf16x2 {target}, t, {scale}, none;"
    )


def _byte_pair(source: str, first: int, target: str, zero: str, scale: str) -> str:
    """The same for two of the four bytes of a register: eight-bit codes do not fit a bfloat16 mantissa."""
    return (
        f"prmt.b32 t, {source}, 0x4B000000, 0x754{first}; mov.b32 a, t;"  # the bits of 2^23 + code in float32
        f" prmt.b32 t, {source}, 0x4B000000, 0x754{first + 1}; mov.b32 b, t;"
        f" mov.b32 c, {zero}; sub.rn.f32 a, a, c; sub.rn.f32 b, b, c;"
        f" mov.b32 c, {scale}; mul.rn.f32 a, a, c; mul.rn.f32 b, b, c; cvt.rn.bf16x2.f32 {target}, b, a;"
    )


def _octet_pairs(bits: int, zero: str, scale: str) -> str:
    """Assembly that turns the quads q0 and q1 into four pairs of bfloat16 values w0 to w3."""
    lines = []
    for pair in range(4):
        quad, first = f"q{pair // 2}", 2 * (pair % 2)
        if bits == 8:
            lines.append(_byte_pair(quad, first, f"w{pair}", zero, scale))
            continue
        if first:
            lines.append(f"shr.u32 x, {quad}, {2 * bits};")
        lines.append(_pair(bits, "x" if first else quad, f"w{pair}", zero, scale))
    return "\n".join(lines)


def _unit_pair(bits: int, pair: int, words: Sequence[str], zero: str, scale: str) -> str:
    """Assembly that decodes one of the sixteen pairs of a unit, given its words, to w0."""
    word, offset = divmod(2 * pair * bits, 32)
    if bits == 8:
        return _byte_pair(words[word], offset // 8, "w0", zero, scale)
    if offset == 0:
        return _pair(bits, words[word], "w0", zero, scale)
    fetch = f"shr.u32 x, {words[word]}, {offset};"
    if offset + 2 * bits > 32:
        fetch = f"shf.r.wrap.b32 x, {words[word]}, {words[word + 1]}, {offset};"
    return f"{fetch} {_pair(bits, 'x', 'w0', zero, scale)}"


_DECLARATIONS = """
.reg .b32 q0, q1, s, t, u, x, y, w0, w1, w2, w3, g0, g1, h<8>, one, none;
.reg .f32 a, b, c, sum;
.reg .pred p;
mov.b32 one, 0x3F803F80;
mov.b32 none, 0x80008000;
"""


def _decode_assembly(bits: int) -> str:
    """Eight values as two words of 64 bits, from (low, middle, high, offset, zero, scale)."""
    split = _SPLIT[bits].format(low="$2", middle="$3", high="$4", at="$5")
    pairs = _octet_pairs(bits, "$6", "$7")
    return f"{{{_DECLARATIONS}{split}\n{pairs}\nmov.b64 $0, {{w0, w1}};\nmov.b64 $1, {{w2, w3}};\n}}"


_SINGLE = (1, 2, 3, 5, 7)  # widths whose words are loaded one by one


def _dot_assembly(bits: int) -> str:
    """A running sum plus 32 products, from (sum, 8 x gradient, words, zero, scale).

    Words are passed as the kernel loads them: two at a time for 4, 6 and 8 bits, else singly.
    """
    lines, words = ["mov.f32 sum, $1;"], []
    if bits == DENSE:
        inputs = [f"${10 + i}" for i in range(8)]
    elif bits in _SINGLE:
        words = [f"${10 + i}" for i in range(bits)]
    else:
        for i in range(bits // 2):
            lines.append(f"mov.b64 {{h{2 * i}, h{2 * i + 1}}}, ${10 + i};")
            words += [f"h{2 * i}", f"h{2 * i + 1}"]
    after = 10 + (bits if bits in _SINGLE else bits // 2)
    for pair in range(16):
        if pair % 2 == 0:
            lines.append(f"mov.b64 {{g0, g1}}, ${2 + pair // 2};")
            if bits == DENSE:
                lines.append(f"mov.b64 {{w1, w2}}, {inputs[pair // 2]};")
        if bits == DENSE:
            lines.append(f"mov.b32 w0, w{1 + pair % 2};")
        else:
            lines.append(_unit_pair(bits, pair, words, f"${after}", f"${after + 1}"))
        lines.append(f"shl.b32 t, g{pair % 2}, 16; mov.b32 a, t; shl.b32 u, w0, 16; mov.b32 b, u;")
        lines.append("fma.rn.f32 sum, a, b, sum;")
        lines.append(f"and.b32 t, g{pair % 2}, 0xFFFF0000; mov.b32 a, t; and.b32 u, w0, 0xFFFF0000;")
        lines.append("mov.b32 b, u; fma.rn.f32 sum, a, b, sum;")
    return f"{{{_DECLARATIONS}" + "\n".join(lines) + "\nmov.f32 $0, sum;\n}"


def _dot_constraints(bits: int) -> str:
    """Kinds of registers of that assembly's operands."""
    if bits == DENSE:
        return ",".join(["=f", "f", *"l" * 16])
    return ",".join(["=f", "f", *"l" * 8, *("r" * bits if bits in _SINGLE else "l" * (bits // 2)), "r", "r"])


# By width of a code.
_WIDTHS = range(DENSE + 1)
_DECODE = tl.constexpr(tuple(_decode_assembly(bits) if bits in _SPLIT else "" for bits in _WIDTHS))
_DOT = tl.constexpr(tuple(_dot_assembly(bits) if bits in (*_SPLIT, DENSE) else "" for bits in _WIDTHS))
_DOT_OPERANDS = tl.constexpr(tuple(_dot_constraints(bits) for bits in _WIDTHS))


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
    """Scale and negative zero point as operands of the assembly."""
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
    """Decode the segments of one program."""
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
def _copy_words(source, out, segments, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """Copy the segments of one program, of ``WORDS`` words of 64 bits each."""
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)[:, None]
    place = index.to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
    inside = index < segments
    tl.store(out + place, tl.load(source + place, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["choices", "programs"])
def _decode_chosen_kernel(
    choices, programs, codes, scales, zeros, out, segments,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, RATIO: tl.constexpr,
    COUNT: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """Decode the segments of one program at the choice of its part of the rows."""
    chosen = tl.load(choices + tl.program_id(0) // programs)
    for k in tl.static_range(len(BITS)):
        if chosen == k:
            if BITS[k] == 16:
                _copy_words(codes[k].to(tl.pointer_type(tl.int64)), out, segments, COUNT, 2 * OCTETS)
            else:
                _decode_kernel(
                    codes[k].to(tl.pointer_type(tl.int32)), scales[k].to(tl.pointer_type(tl.bfloat16)),
                    zeros[k].to(tl.pointer_type(tl.uint8)), out, segments,
                    BITS[k], SYMMETRIC[k], RATIO, COUNT, OCTETS,
                )  # fmt: skip


@triton.jit
def _consecutive(place, COUNT: tl.constexpr):
    """``COUNT`` consecutive words from each position."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(place + i),)
    return found


@triton.jit
def _unit_words(codes, unit, BITS: tl.constexpr):
    """The words of a unit's codes: two in one for 4, 6 and 8 bits, else singly."""
    start = unit.to(tl.int64)
    if BITS % 2 == 1 or BITS == 2:
        found = _consecutive(codes.to(tl.pointer_type(tl.int32)) + start * BITS, BITS)
    else:
        found = _consecutive(codes.to(tl.pointer_type(tl.int64)) + start * (BITS // 2), BITS // 2)
    return found


@triton.jit
def _inner_products_kernel(
    gradient, codes, scales, zeros, partial, units, steps,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, UNITS_PER_SCALE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    sums = ()
    for k in tl.static_range(len(BITS)):
        sums = sums + (tl.zeros((COUNT,), tl.float32),)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        unit = step * COUNT + tl.arange(0, COUNT)
        inside = (unit < units).to(tl.float32)
        unit = tl.minimum(unit, units - 1) + tl.program_id(1) * units
        slopes = _consecutive(gradient + unit.to(tl.int64) * 8, 8)
        added = ()
        for k in tl.static_range(len(BITS)):
            zero = tl.zeros((COUNT,), tl.float32)
            if BITS[k] == 16:
                dense = codes[k].to(tl.pointer_type(tl.int64)) + unit.to(tl.int64) * 8
                operands = (zero,) + slopes + _consecutive(dense, 8)
            else:
                grid = _scale_and_zero(
                    scales[k].to(tl.pointer_type(tl.bfloat16)), zeros[k].to(tl.pointer_type(tl.uint8)),
                    unit, UNITS_PER_SCALE, BITS[k], SYMMETRIC[k],
                )  # fmt: skip
                operands = (zero,) + slopes + _unit_words(codes[k], unit, BITS[k]) + (grid[1], grid[0])
            found = tl.inline_asm_elementwise(
                _DOT[BITS[k]], _DOT_OPERANDS[BITS[k]], operands, dtype=tl.float32, is_pure=True, pack=1
            )
            # Units past the end repeat the last one and do not count.
            added = added + (sums[k] + found * inside,)
        sums = added
    target = partial + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * len(BITS)
    for k in tl.static_range(len(BITS)):
        tl.store(target + k, tl.sum(sums[k], axis=0))


def decodes(dtype: torch.dtype, operands: Sequence[Operand], group: int, shape: tuple[int, int]) -> bool:
    """Whether :func:`decoder` supports this matrix and a result of this type."""
    return _regular(dtype, operands, group, shape, SEGMENT)


def multiplies(dtype: torch.dtype, operands: Sequence[Operand], group: int, shape: tuple[int, int]) -> bool:
    """Whether :func:`multiplier` supports these options and a gradient of this type."""
    return _regular(dtype, operands, group, shape, _UNIT)


def _regular(
    dtype: torch.dtype, operands: Sequence[Operand], group: int, shape: tuple[int, int], run: int
) -> bool:
    """Whether all is bfloat16, and rows and groups are whole runs of columns."""
    rows, cols = shape
    whole = cols % run == 0 and (group >= cols or (group % run == 0 and cols % group == 0))
    # Counts of runs are 32 bits wide.
    return (
        whole
        and rows * cols // 8 < 2**31
        and dtype == torch.bfloat16
        and all(o.minima is None and o.table is None for o in operands)
        and all(
            part.dtype == torch.bfloat16 and part.is_contiguous() and part.data_ptr() % 16 == 0
            for part in (o.codes if o.bits == DENSE else o.scales for o in operands)
        )
    )


def decoder(operand: Operand, group: int, shape: tuple[int, int]) -> Callable[[Tensor], None]:
    """Kernel that writes the decoded matrix to memory aligned to 16 bytes."""
    segments = shape[0] * shape[1] // SEGMENT
    launch = _decode_kernel[(triton.cdiv(segments, _DECODE_COUNT),)]
    codes, scales = operand.codes, operand.scales
    zeros = scales if operand.zeros is None else operand.zeros
    settings = {
        "BITS": operand.bits, "SYMMETRIC": operand.zeros is None, "RATIO": min(group, shape[1]) // SEGMENT,
        "COUNT": _DECODE_COUNT, "OCTETS": _OCTETS, "num_warps": _WARPS,
    }  # fmt: skip

    def decode(out: Tensor) -> None:
        with launching_at(out):
            launch(codes, scales, zeros, out.view(torch.int64), segments, **settings)

    return decode


def decodes_parts(shape: tuple[int, int], parts: int) -> bool:
    """Whether :func:`chosen_decoder` supports that many parts of the rows: no program may span two."""
    return parts == 1 or (
        shape[0] % parts == 0 and shape[0] // parts * shape[1] % (SEGMENT * _DECODE_COUNT) == 0
    )


def chosen_decoder(
    operands: Sequence[Operand], group: int, shape: tuple[int, int], parts: int = 1
) -> Callable[[Tensor, Tensor], None]:
    """Kernel that decodes, for each part of the rows, the operand whose index is on the device.

    The output must be aligned to 16 bytes.
    """
    segments = shape[0] * shape[1] // SEGMENT
    programs = triton.cdiv(segments, _DECODE_COUNT)
    launch, share = _decode_chosen_kernel[(programs,)], programs // parts
    addresses, kinds = _described(operands)
    settings = {
        **kinds, "RATIO": min(group, shape[1]) // SEGMENT,
        "COUNT": _DECODE_COUNT, "OCTETS": _OCTETS, "num_warps": _WARPS,
    }  # fmt: skip

    def decode(choices: Tensor, out: Tensor) -> None:
        with launching_at(out):
            launch(choices, share, *addresses, out.view(torch.int64), segments, **settings)

    return decode


def _described(operands: Sequence[Operand]) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Addresses of codes, scales and zeros of all operands; their widths and kinds of grid as constants.

    Addresses are plain numbers: examining that many tensors would take longer than most layers compute. The caller
    must keep the operands alive.
    """
    zeros = [operand.scales if operand.zeros is None else operand.zeros for operand in operands]
    tables = [[operand.codes for operand in operands], [operand.scales for operand in operands], zeros]
    kinds: dict[str, tuple[int, ...]] = {
        "BITS": tuple(operand.bits for operand in operands),
        "SYMMETRIC": tuple(operand.zeros is None for operand in operands),
    }
    return [tuple(tensor.data_ptr() for tensor in table) for table in tables], kinds


def multiplier(
    operands: Sequence[Operand], group: int, shape: tuple[int, int], parts: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Kernel of ``<G, W_k>`` for all operands: float64 (K,), or (K, parts) for each part of the rows."""
    units = shape[0] * shape[1] // _UNIT // parts
    steps = triton.cdiv(units, _DOT_COUNT)
    programs = min(steps, max(1, _PROGRAMS_PER_CORE * multiprocessors(device) // parts))
    launch = _inner_products_kernel[(programs, parts)]
    addresses, kinds = _described(operands)
    settings = {
        **kinds, "UNITS_PER_SCALE": min(group, shape[1]) // _UNIT,
        "COUNT": _DOT_COUNT, "num_warps": _WARPS, "maxnreg": _REGISTERS,
    }  # fmt: skip
    partial = partial_sums(len(operands), programs, parts)

    def multiply(gradient: Tensor) -> Tensor:
        sums = torch.empty(partial, dtype=torch.float32, device=device)
        with launching_at(gradient):
            launch(gradient.view(torch.int64), *addresses, sums, units, steps, **settings)
        return over_programs(sums)

    return multiply
