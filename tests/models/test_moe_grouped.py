"""Multiplications of runs of rows: by blocks, as on a GPU without the kernel, and one expert at a time."""

import pytest
import torch

from rco.models.moe import grouped as moe_grouped
from rco.models.moe.grouped import _blocked_linear, _blocked_outer, _Blocks, grouped_linear, grouped_outer

LENGTHS = [[5, 0, 40, 1], [0, 0, 3], [64, 64], [0, 100, 0, 0, 2], [1] * 7, [33], [0, 0]]


def runs(lengths, dtype, *widths):
    generator = torch.Generator().manual_seed(sum(lengths))
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32)
    return ends, [torch.randn(sum(lengths), width, generator=generator).to(dtype) for width in widths]


def plain(lengths, multiply):
    parts = torch.split(torch.arange(sum(lengths)), lengths)
    return [multiply(expert, rows) for expert, rows in enumerate(parts)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_bytes", [1, 2**28])
def test_products_are_those_of_one_expert_at_a_time(lengths, dtype, batch_bytes, monkeypatch):
    monkeypatch.setattr(moe_grouped, "_BATCH_BYTES", batch_bytes)
    ends, (left, right) = runs(lengths, dtype, 6, 8)
    weight = torch.randn(len(lengths), 6, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        wanted = torch.cat(plain(lengths, lambda expert, rows: left[rows] @ weight[expert]))
        for multiply in (_blocked_linear, grouped_linear):
            torch.testing.assert_close(multiply(left, stored, ends), wanted)
    wanted = torch.stack(plain(lengths, lambda _, rows: left[rows].t() @ right[rows]))
    for multiply in (_blocked_outer, grouped_outer):
        torch.testing.assert_close(multiply(left, right, ends), wanted)


@pytest.mark.parametrize("lengths", LENGTHS[:-1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_those_of_one_expert_at_a_time(lengths, dtype):
    ends, (rows, given) = runs(lengths, dtype, 8, 12)
    weight = torch.randn(len(lengths), 12, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    leaves = [rows.requires_grad_(), weight.requires_grad_()]
    found = torch.autograd.grad(grouped_linear(rows, weight.transpose(1, 2), ends), leaves, given)
    together = torch.cat(plain(lengths, lambda expert, mine: rows[mine] @ weight[expert].T))
    for mine, wanted in zip(found, torch.autograd.grad(together, leaves, given), strict=True):
        torch.testing.assert_close(mine, wanted)
        assert mine.is_contiguous()


@pytest.mark.parametrize("lengths", LENGTHS[:-1], ids=str)
def test_every_row_has_a_place_in_a_block_of_its_expert(lengths):
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32)
    blocks = _Blocks.cut(ends, sum(lengths))
    assert len(blocks.experts) <= 2 * len(lengths) + sum(lengths) // moe_grouped._SHORTEST_BLOCK
    assert blocks.rows.flatten()[blocks.places].tolist() == list(range(sum(lengths)))
    assert int((~blocks.empty).sum()) == sum(lengths)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert blocks.experts.repeat_interleave(blocks.rows.shape[1])[blocks.places].equal(owners)


def test_what_fills_a_block_up_does_not_count():
    """Rows next to a run may hold anything."""
    ends, (left, right) = runs([3, 20, 2], torch.float32, 4, 4)
    left[3:23], right[23:] = torch.inf, torch.nan
    weight = torch.ones(3, 4, 5)
    assert _blocked_linear(left, weight, ends)[[0, 1, 2, 23, 24]].isfinite().all()
    assert _blocked_outer(left, right, ends)[0].isfinite().all()
