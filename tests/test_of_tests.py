"""What the tests promise about themselves: GPU tests are never a success without a GPU."""

from types import SimpleNamespace

import pytest
import torch


def collected(*marks):
    return SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)


@pytest.mark.parametrize("available", [False, True])
def test_gpu_tests_without_a_gpu_are_an_error(pytestconfig, monkeypatch, available):
    (root,) = (
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if hasattr(plugin, "refuse_gpu_tests_without_gpu")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    root.refuse_gpu_tests_without_gpu([collected(), collected("slow")])
    asked = [collected("gpu"), collected(), collected("gpu", "slow")]
    if available:
        root.refuse_gpu_tests_without_gpu(asked)
    else:
        with pytest.raises(pytest.UsageError, match=r"2 GPU tests .* no CUDA GPU"):
            root.refuse_gpu_tests_without_gpu(asked)
