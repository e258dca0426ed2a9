"""A model divided among the GPUs of a rank, as far as a machine without GPUs can tell."""

from types import SimpleNamespace

import pytest
import torch

from rco.distributed import Ranks
from rco.models.device_map import DeviceMap
from rco.models.zoo import ModelError
from rco.testing.search_cases import make_case, sample_of


@pytest.fixture
def eight_gpus(monkeypatch):
    """A machine with 8 GPUs, on paper."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1000 + gpu, 2000))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_gpus_of_a_machine_are_divided_among_its_ranks(eight_gpus, count):
    team = [Ranks(index, count, index, count) for index in range(count)]
    assert sorted(gpu for ranks in team for gpu in ranks.gpus) == list(range(8))
    sizes = [len(ranks.gpus) for ranks in team]
    assert max(sizes) - min(sizes) <= 1
    if count > 1:
        assert [ranks.device("cuda") for ranks in team] == [f"cuda:{index}" for index in range(count)]
        assert [ranks.device("cuda", several=True) for ranks in team] == [f"cuda:{r.gpus[0]}" for r in team]
        assert team[1].device("cpu") == "cpu"


def test_more_ranks_than_gpus_are_refused(eight_gpus):
    with pytest.raises(ValueError, match="9 ranks on this machine, but 8 GPUs: start at most 8"):
        Ranks(0, 9, 0, 9).device("cuda")


def test_only_the_gpus_of_the_rank_are_used_and_all_of_the_model_must_fit(eight_gpus, monkeypatch):
    monkeypatch.setattr("rco.requirements.version", lambda package: "1.0")
    device_map = DeviceMap("auto", range(4, 8))
    assert device_map.free_memory() == {4: 1004, 5: 1005, 6: 1006, 7: 1007}
    device_map.check(SimpleNamespace(hf_device_map={"model.layers.0": 4, "lm_head": 7}), "Big")
    with pytest.raises(ModelError, match=r"Big does not fit the GPUs \[4, 5, 6, 7\]: lm_head and 1 more"):
        device_map.check(SimpleNamespace(hf_device_map={"a": 4, "lm_head": "cpu", "b": "disk"}), "Big")
    with pytest.raises(ModelError, match="this machine has 8"):
        DeviceMap("auto", range(6, 10))
    with pytest.raises(ModelError, match="Unknown device map 'diagonal'"):
        DeviceMap("diagonal", range(8))
    monkeypatch.setattr("rco.requirements.version", lambda package: "0.34")
    with pytest.raises(ValueError, match=r"needs accelerate 1.0 or later; installed is 0.34"):
        DeviceMap("auto", range(4))


@pytest.mark.parametrize("shape", ["quick", "quick-moe"])
def test_a_sample_is_the_same_under_the_hooks_that_accelerate_puts_around_modules(shape):
    hooks = pytest.importorskip("accelerate.hooks")
    case = make_case(shape, torch.device("cpu"), length=12, group=32)
    with sample_of(case) as work:
        wanted = work()
    for module in case.loaded.model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    with sample_of(case) as work:
        found = work()
    assert float(wanted.abs().max()) > 0
    assert torch.equal(found, wanted)
