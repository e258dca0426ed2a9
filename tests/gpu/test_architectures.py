"""Samples of every architecture are recorded as CUDA graphs on a GPU, and are those that are launched."""

import pytest
import torch
from named_architectures import NAMED

from rco.models.loading import wrap_model
from rco.models.moe.grouped import grouped_linear, grouped_outer
from rco.testing.search_cases import make_case, sampled_gates
from rco.testing.tiny_models import _COMMON, _OWN, TINY_MOE_NAMES, tiny_model, tiny_moe

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
# Rows of 128 columns, which the kernels that read the choices of experts on the GPU want.
WIDE = {
    "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "n_inner": 128, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip


def wide_model(name):
    """A tiny model whose linears have 128 columns or a multiple."""
    known = {**_COMMON, **_OWN.get(name, {})}
    changes = {key: value for key, value in WIDE.items() if known.get(key) is not None}
    if "qk_rope_head_dim" in known:  # the head's size is another thing there
        changes.pop("head_dim")
    return tiny_model(name, **changes)


def check_samples(model, dtype, job, caplog):
    """Replayed samples are those that are launched; returns whether samples may be recorded at all."""
    loaded = wrap_model(model.to(CUDA, dtype), name="tiny")
    case = make_case("quick-moe", CUDA, length=24, group=128, loaded=loaded, job=job)
    requests = [(gates, batch) for batch, gates in enumerate(sampled_gates(case, 4))]
    case.backend.graphs = False
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)() for request in requests]
    case.backend.graphs = True
    with case.backend.objective(case.data) as objective:
        recordable = objective.recordable
        objective.enqueue(*requests[0])()
        found = [objective.enqueue(*request)() for request in requests]
        assert not any("recorded" in message for message in caplog.messages)
        assert objective.recorded == recordable
    exact = dtype == torch.float32
    for (loss, gradient), (expected, slope) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(expected, rel=1e-3 if exact else 0.05)
        if exact:  # in bfloat16 another order of sums may send a token to another expert
            assert float((gradient - slope).norm() / slope.norm()) < 1e-3
    return recordable


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_pruning_is_recorded(name, dtype, caplog):
    assert check_samples(tiny_moe(name), dtype, "prune", caplog)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_quantization_is_recorded(name, dtype, caplog):
    recordable = check_samples(wide_model(name), dtype, "quantize", caplog)
    assert recordable or dtype == torch.float32  # in which choices of experts are not read on the GPU


@pytest.mark.parametrize("width", [32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_runs_of_rows_are_multiplied_as_on_the_cpu(dtype, width):
    lengths = [5, 0, 400, 1, 30]
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32)
    rows, others = (torch.randn(sum(lengths), width, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(len(lengths), width, 48, generator=generator).to(dtype)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    used = torch.tensor(lengths) > 0  # the kernel leaves the others undefined
    wide = [tensor.double() for tensor in (rows, weight, others)]
    tolerance = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.5}
    for stored in (weight, turned):
        found = grouped_linear(rows.to(CUDA), stored.to(CUDA), ends.to(CUDA))
        torch.testing.assert_close(found.cpu().double(), grouped_linear(wide[0], wide[1], ends), **tolerance)
    found = grouped_outer(rows.to(CUDA), others.to(CUDA), ends.to(CUDA))
    wanted = grouped_outer(wide[0], wide[2], ends)
    torch.testing.assert_close(found.cpu().double()[used], wanted[used], **tolerance)
