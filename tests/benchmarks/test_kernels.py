"""The benchmark of kernels compares each of them with another path, never with itself."""

import kernels
import pytest
import torch

CPU = torch.device("cpu")
CASES = kernels.cases(16, 128, CPU)
ON_GPUS_ALONE = {
    name for name in CASES if "inputs, fp8" in name or name == "training step of codes and scales"
}


@pytest.mark.parametrize("name", CASES)
def test_every_operation_has_a_kernel_that_is_left_out(name):
    modules, run = CASES[name]
    measured = kernels.compare(run, modules, CPU, repeats=1)
    assert (measured is None) == (name in ON_GPUS_ALONE)
    if measured is None:
        return
    assert [len(times) for times in measured] == [1, 1]


def test_what_has_no_kernel_is_not_compared():
    assert kernels.compare(lambda: torch.ones(3).sum(), [kernels.coded], CPU, repeats=1) is None
