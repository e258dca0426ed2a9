import pytest
import torch

from rco.formats.integer import PackedWeight, pack


def quantize(weight, bits, group_size, symmetric):
    """Round to nearest, written plainly; scales in the weight's type."""
    rows, columns = weight.shape
    group_size = columns if group_size is None else group_size
    groups = -(-columns // group_size)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group_size - columns))
    blocks = padded.view(rows, groups, group_size)
    if symmetric:
        scales = (blocks.abs().amax(-1) / 2 ** (bits - 1)).clamp_min(1e-6).to(weight.dtype)
        zeros = torch.full((rows, groups), 2 ** (bits - 1))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((high - low) / (2**bits - 1)).clamp_min(1e-6).to(weight.dtype)
        zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    codes = (blocks / scales.float()[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, 2**bits - 1).to(torch.uint8).view(rows, -1)[:, :columns].contiguous()
    stored = None if symmetric else zeros.to(torch.uint8)
    return PackedWeight(pack(codes, bits), scales, stored, bits, (rows, columns), group_size)


@pytest.fixture(scope="session")
def rtn():
    return quantize


@pytest.fixture(autouse=True)
def _quiet_bars(monkeypatch):
    # compressed-tensors shows progress bars through tqdm.
    monkeypatch.setenv("TQDM_DISABLE", "1")
