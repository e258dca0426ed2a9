"""In which type a model computes."""

import pytest
import torch

from rco.models.precision import compute_dtype, computing_in

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "checkpoint", "expected"),
    [
        ("auto", CPU, torch.bfloat16, torch.float32),
        ("auto", GPU, torch.bfloat16, torch.bfloat16),
        ("float32", GPU, torch.bfloat16, torch.float32),
        ("bfloat16", CPU, torch.bfloat16, torch.bfloat16),
        ("float32", CPU, torch.float32, torch.float32),
    ],
)
def test_the_type_of_the_arithmetic(name, device, checkpoint, expected):
    assert compute_dtype(name, device, checkpoint) == expected


def test_a_narrower_type_than_the_checkpoints_is_refused():
    with pytest.raises(ValueError, match="`dtype='bfloat16'`"):
        compute_dtype("bfloat16", CPU, torch.float32)


def test_widening_leaves_no_trace():
    model = torch.nn.Linear(7, 5).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with computing_in(model, torch.float32):
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    after = model.state_dict()
    assert all(
        torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items()
    )
