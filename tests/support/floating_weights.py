"""Weights that a floating-point format holds exactly."""

import torch

from rco.formats.floating import FloatingPoint

ELEMENTS = {
    "e2m1": torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    "int8": torch.arange(-127, 128).float(),
}
ELEMENTS["e4m3"] = ELEMENTS["e4m3"][ELEMENTS["e4m3"].isfinite()]


def representable(name):
    """Weights of exact elements with power-of-two scales, the largest element in every group."""
    format = FloatingPoint(name)
    element, scaling = format.kind.element, format.kind.scaling

    def make(shape):
        generator = torch.Generator().manual_seed(3)
        rows, columns = shape
        size = format.group_size(columns)
        elements = ELEMENTS[element]
        weight = elements[torch.randint(0, len(elements), shape, generator=generator)]
        weight[:, ::size] = elements.max()
        exponents = torch.randint(-4, 4, (rows, -(-columns // size)), generator=generator)
        if scaling == "block":
            exponents = exponents[:1].expand(rows, -1)
        if scaling == "group16":
            exponents[0, 0] = (
                8  # the scale of the whole tensor is then 7/4, whose products with powers of two fit
            )
        return weight * torch.exp2(exponents.float()).repeat_interleave(size, dim=1)[:, :columns]

    return make
