"""Where the candidates go, as asked or by what is free on the GPU, and what is counted as its memory."""

from types import SimpleNamespace

import pytest
import torch

from rco.compression.memory import SearchMemory
from rco.pipeline import estimate
from rco.pipeline.configs import PruneConfig, QuantizeConfig
from rco.pipeline.estimate import choose_residency

GIB = 2**30


def needs(offload):
    """Sixteen GiB of weights that are there already, and 36 or 9 more."""
    return SearchMemory(4 * GIB, 12 * GIB, (3 if offload else 30) * GIB, 5 * GIB, GIB)


@pytest.fixture
def choose(monkeypatch):
    """The choice on GPUs with so many GiB free."""

    def chosen(free, devices=("cuda:0",), **settings):
        places = [torch.device(device) for device in devices]
        parameters = [SimpleNamespace(device=place) for place in places]
        model = SimpleNamespace(parameters=lambda: iter(parameters))
        loaded = SimpleNamespace(device=places[0], dtype=torch.bfloat16, model=model, place=None)
        monkeypatch.setattr(estimate, "search_memory", lambda *_, offload, **__: needs(offload))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * GIB), 141 * GIB))
        config = QuantizeConfig(model="any", bits="3", **settings)
        return choose_residency(loaded, None, config)

    return chosen


def test_candidates_stay_on_the_gpu_where_they_fit(choose):
    # Nine tenths of what is free, for 36 GiB of candidates, activations and workspace.
    assert choose(40.1) == ("resident", needs(False))
    assert choose(39.9) == ("offload", needs(True))
    assert choose(10.1) == ("offload", needs(True))


def test_a_gpu_that_is_too_small_is_said_before_the_run(choose):
    with pytest.raises(
        ValueError, match=r"about 25\.0 GiB .* even with .* 24\.1 GiB are free\. .* `checkpointing=True`"
    ):
        choose(9)
    with pytest.raises(ValueError, match=r"are free. It needs less with a shorter `length`") as error:
        choose(9, checkpointing=True)
    assert "`checkpointing" not in str(error.value)


def test_what_is_asked_for_is_done(choose):
    assert choose(100, memory="offload") == ("offload", needs(True))
    assert choose(1, memory="resident") == ("resident", needs(False))
    assert choose(1, devices=("cpu",), memory="offload") == ("resident", needs(False))  # one memory for all


def test_a_model_on_several_gpus_keeps_candidates_beside_its_linears(choose):
    assert choose(1, devices=("cuda:0", "cuda:1"))[0] == "resident"
    with pytest.raises(ValueError, match="streams to one GPU"):
        choose(100, devices=("cuda:0", "cuda:1"), memory="offload")


def test_the_reference_of_pruning_is_in_host_memory(monkeypatch):
    monkeypatch.setattr(estimate, "forward_seconds", lambda *_: 1e-6)
    counted = SearchMemory(weights=1000, originals=0, candidates=0, activations=100, workspace=10)
    head = SimpleNamespace(weight=torch.empty(100, 8))
    found = {}
    for device in ("cpu", "cuda"):
        layout = SimpleNamespace(head=lambda _: head)
        loaded = SimpleNamespace(model=None, layout=layout, device=torch.device(device))
        plan = SimpleNamespace(removes_only=True, target=None)
        compression = SimpleNamespace(loaded=loaded, compute_dtype=torch.bfloat16, plan=plan)
        config = PruneConfig(model="any", experts="0.25")
        found[device] = estimate.estimate(compression, config, "resident", counted)
    assert found["cuda"].reference_bytes == found["cpu"].reference_bytes > 0
    assert found["cpu"].memory - found["cuda"].memory == found["cuda"].reference_bytes
