"""Contract of storage formats, as a check for any implementation.

A failed check raises an AssertionError that describes the failure.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from safetensors.torch import load, save
from torch import Tensor

from rco import formats
from rco.formats.base import EncodeSettings, Format, Stored, Tunable
from rco.formats.products import inner_products
from rco.formats.switchable import SwitchableLinear

__all__ = ["check_format"]

Shape = tuple[int, int]
_SHAPES = ((6, 256), (4, 512))
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROBES = 8  # entries of a trainable parameter that are moved


def check_format(
    format: Format,
    *,
    shapes: Sequence[Shape] = _SHAPES,
    device: torch.device | str = "cpu",
    engine: Callable[[Mapping[str, Tensor], Shape], Tensor] | None = None,
    representable: Callable[[Shape], Tensor] | None = None,
) -> None:
    """Check bytes, encoding, decoding, inner products, rows and stacks, training, serialization and switching.

    Args:
        format: The format.
        shapes: (out, in) of the weights to try.
        device: Device to compute on; results of other devices are also compared with the CPU's.
        engine: The serving engine's own decoder: from the tensors of the checkpoint file to the dense matrix in the
            type of the scales.
        representable: Weights that the format holds exactly, float32; decoded ones if not given.
    """
    _check_name(format)
    for shape in shapes:
        for dtype in _DTYPES:
            settings = EncodeSettings(storage_dtype=dtype)
            weight = random_weight(shape).to(device)
            moments = _moments(shape[1]).to(device)
            for statistics in (None, moments):
                stored = _check_encoding(format, weight, statistics, settings)
                _check_bytes(format, stored, dtype)
                _check_decoding(format, stored, engine)
                _check_products(format, stored)
                _check_copies(format, stored)
            exact = stored.dequantize() if representable is None else representable(shape).to(device)
            again = format.encode(exact.float(), None, settings=settings)
            assert torch.equal(again.dequantize(torch.float32).to(exact.device), exact.float()), (
                f"{format.name} does not give back a {shape} weight that it represents exactly"
            )
            _check_stack(format, shape, settings, device)
            _check_training(format, stored)
        _check_gradients(format, shape, device)
        _check_switching(format, shape, device)


def random_weight(shape: Shape, seed: int = 0) -> Tensor:
    """A float32 weight with heavy tails and one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).add(0.1)
    weight[-1] = 0
    return weight


def _moments(columns: int) -> Tensor:
    inputs = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(1))
    return inputs.T @ inputs / len(inputs)


def _check_name(format: Format) -> None:
    found = type(format).parse(format.name)
    assert found == format, f"{format.name!r} is parsed as {found}"
    assert hash(found) == hash(format), "equal formats have equal hashes"
    assert pickle.loads(pickle.dumps(format)) == format, "a format survives pickling"  # noqa: S301 - our own
    assert type(format).parse(f"not {format.name}") is None, "another name is not this family's"
    assert format.bits >= 0, f"{format.name} has {format.bits} bits"


def _check_encoding(
    format: Format, weight: Tensor, statistics: Tensor | None, settings: EncodeSettings
) -> Stored:
    before = weight.clone()
    stored = format.encode(weight, statistics, settings=settings)
    assert torch.equal(weight, before), "encoding changes the weight"
    assert stored.format == format.on(weight.shape[1]), f"{format.name} made {stored.format.name}"
    assert tuple(stored.shape) == tuple(weight.shape)
    assert {each.device for each in stored.tensors.values()} <= {weight.device}, "tensors stay on the device"
    (together,) = formats.encode_all([format], weight, statistics, settings=settings)
    for other in (format.encode(weight, statistics, settings=settings), together.stored):
        assert stored.tensors.keys() == other.tensors.keys()
        for name, tensor in stored.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), f"{name} differs from one encoding to the next"
    assert 0 <= together.error < float("inf")
    assert 0 <= together.relative_error <= 1 + 1e-6, (
        f"the error is {together.relative_error:.3g} of the weight itself"
    )
    return stored


def _check_bytes(format: Format, stored: Stored, dtype: torch.dtype) -> None:
    layout, tensors = format.on(stored.shape[1]).layout(stored.shape, dtype), format.file_tensors(stored)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert found == {name: tuple(each) for name, each in layout.items()}, f"{format.name} writes {found}"
    file = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    written = len(file) - 8 - int.from_bytes(file[:8], "little")
    promised = format.nbytes(stored.shape, dtype)
    assert promised == written, f"{format.name} reports {promised} bytes and writes {written}"


def _check_decoding(
    format: Format, stored: Stored, engine: Callable[[Mapping[str, Tensor], Shape], Tensor] | None
) -> None:
    own = format.decode(stored, stored.dtype)
    assert own.dtype == stored.dtype
    assert tuple(own.shape) == tuple(stored.shape)
    assert torch.isfinite(own).all(), f"{format.name} decodes to numbers that are not finite"
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        decoded = format.decode(stored, dtype)
        assert torch.equal(decoded, own.to(dtype)), f"decoding to {dtype} is not decoding, then casting"
        out = torch.full(stored.shape, torch.nan, dtype=dtype, device=stored.device)
        stored.decode(out)
        assert torch.equal(out, decoded.to(out.device)), "decoded into a given matrix, it differs"
    if engine is not None:
        files = {name: tensor.cpu() for name, tensor in format.file_tensors(stored).items()}
        theirs = engine(files, stored.shape)
        assert torch.equal(own.cpu(), theirs.to(own.dtype)), f"the engine decodes {format.name} differently"
    elsewhere = stored.to("cpu")
    assert torch.equal(format.decode(elsewhere, stored.dtype), own.cpu()), "the CPU decodes it differently"


def _check_products(format: Format, stored: Stored) -> None:
    rows, columns = stored.shape
    dense = format.decode(stored, torch.float64)
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        gradient = torch.randn(rows, columns, generator=generator).to(device=stored.device, dtype=dtype)
        terms = gradient.double() * dense.to(stored.device)
        for segments in (1, rows):
            exact = terms.view(segments, -1).sum(dim=1)
            scale = terms.abs().view(segments, -1).sum(dim=1)
            found = format.inner_products(stored, gradient, segments)
            fused = inner_products(gradient, [stored, None], segments).view(2, segments)
            assert tuple(found.shape) == (segments,), f"inner products have shape {tuple(found.shape)}"
            assert not fused[1].any()
            for each in (found, fused[0]):
                assert ((each.double() - exact).abs() <= 1e-5 * scale + 1e-12).all(), (
                    f"the inner products of {format.name} are {each.tolist()} instead of {exact.tolist()}"
                )


def _check_copies(format: Format, stored: Stored) -> None:
    content = save({name: tensor.cpu().contiguous() for name, tensor in stored.tensors.items()})
    read = format.on(stored.shape[1]).restore(stored.shape, load(content))
    for other in (read.to(stored.device), stored.clone(), stored.to("cpu").to(stored.device)):
        assert type(other) is type(stored)
        assert other.format == stored.format
        assert other.nbytes == stored.nbytes
        assert torch.equal(other.dequantize(), stored.dequantize()), (
            f"a copy of {format.name} decodes differently"
        )


def _check_stack(format: Format, shape: Shape, settings: EncodeSettings, device: torch.device | str) -> None:
    parts = [format.encode(random_weight(shape, s).to(device), settings=settings) for s in range(3)]
    stack = format.stack(parts)
    assert tuple(stack.shape) == (3 * shape[0], shape[1])
    assert stack.nbytes == sum(part.nbytes for part in parts), "a stack takes as much as its parts"
    decoded = stack.dequantize()
    assert torch.equal(decoded, torch.cat([part.dequantize() for part in parts])), "a stack is its parts"
    for index, part in enumerate(parts):
        rows = stack.rows(index * shape[0], (index + 1) * shape[0])
        assert torch.equal(rows.dequantize(), part.dequantize()), "rows of a stack are the part"
    gradient = torch.randn(stack.shape, generator=torch.Generator().manual_seed(3)).to(device)
    together = format.inner_products(stack, gradient, 3)
    each = [
        format.inner_products(part, gradient[i * shape[0] : (i + 1) * shape[0]])
        for i, part in enumerate(parts)
    ]
    torch.testing.assert_close(together, torch.cat(each), rtol=1e-5, atol=1e-6)


def _tunable(format: Format, stored: Stored) -> Tunable | None:
    made = format.tunable(stored)
    if made is not None:
        assert any(True for _ in made.parameters()), "a tunable weight has parameters"
    return made


def _check_training(format: Format, stored: Stored) -> None:
    """Check that at any parameters the stored weight decodes to the forward pass, bit for bit."""
    made = _tunable(format, stored)
    if made is None:
        return
    assert torch.equal(made().detach(), stored.dequantize()), "untrained, it is the stored weight"
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                step = made.spacing.get(name, float(parameter.abs().mean()) or 1.0)
                parameter.add_(step * torch.randn(parameter.shape, generator=generator).to(parameter))
        trained = made.stored()
        assert trained.format == stored.format
        assert torch.equal(made().detach(), trained.dequantize()), (
            f"the trained {format.name} is stored as another matrix than its forward pass computes"
        )


def _check_gradients(format: Format, shape: Shape, device: torch.device | str) -> None:
    """Compare gradients of the trainable parameters with finite differences, in float64."""
    if torch.device(device).type == "mps":
        return
    settings = EncodeSettings(storage_dtype=torch.float64)
    stored = format.encode(random_weight(shape).double().to(device), settings=settings)
    made = _tunable(format, stored)
    if made is None:
        return
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    def value() -> Tensor:
        decoded: Tensor = made()
        return (decoded.double() * direction).sum()

    # Decoded values that are rounded to a narrow type move by a rounding more or less.
    rounding = 0.0
    if stored.dtype != torch.float64:
        largest = float(stored.dequantize(torch.float64).abs().max())
        rounding = torch.finfo(stored.dtype).eps * largest * float(direction.abs().max())
    parameters = dict(made.named_parameters())
    gradients = torch.autograd.grad(value(), list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        flat = parameter.data.view(-1)
        for place in torch.randperm(flat.numel(), generator=generator)[:_PROBES].tolist():
            kept, found = float(flat[place]), float(gradient.reshape(-1)[place])
            step, ends = made.spacing.get(name, 1e-6 * max(abs(kept), 1e-3)), []
            for moved in (kept - step, kept, kept + step):
                flat[place] = moved
                ends.append(float(value().detach()))
            flat[place] = kept
            # At the end of a grid one of the two sides is flat.
            slopes = [(after - before) / step for before, after in pairwise(ends)]
            nearest = min(slopes, key=lambda slope: abs(slope - found))
            noise = (1e-14 * abs(ends[1]) + rounding) / step
            assert abs(found - nearest) <= 1e-4 * abs(nearest) + 10 * noise + 1e-9, (
                f"the gradient of {name} is {found}, differences give {slopes}"
            )


def _check_switching(format: Format, shape: Shape, device: torch.device | str) -> None:
    """Compare a linear that may be original, this format or removed with the dense ones, with gradients."""
    weight = random_weight(shape).to(device)
    stored = format.encode(weight, settings=EncodeSettings(storage_dtype=torch.float32))
    removed = formats.parse("removed").encode(weight)
    dense = torch.stack([weight, format.decode(stored, torch.float32).to(device), torch.zeros_like(weight)])
    layer = SwitchableLinear([None, stored, removed], weight)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(6)).to(device)
    own = format.input_rule(stored)
    for choice in range(3):
        gate = torch.zeros(3, device=device)
        gate[choice] = 1.0
        gate.requires_grad_()
        layer.select(choice, gate)
        inputs = torch.stack([x, x if own is None else own(x), x])
        expected = inputs[choice] @ dense[choice].T
        found = layer(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        (ours,) = torch.autograd.grad(found.square().sum(), gate)
        # Rounded inputs count to first order, so exactly for the chosen option.
        slope = 2 * expected
        theirs = torch.einsum("to,koi,ti->k", slope, dense, x)
        theirs += torch.einsum("ti,kti->k", slope @ dense[choice], inputs - x)
        theirs[choice] = (slope * expected).sum()
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
