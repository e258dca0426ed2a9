"""Experts whose options come from host memory, seen without a GPU: the same samples from a few buffers."""

from contextlib import contextmanager

import pytest
import torch
from expert_cases import experts_case

from rco.compression.cuda_graphs import Recording
from rco.formats.streaming import OptionStream, pinned_together
from rco.formats.switchable import LayerOptions
from rco.models.moe.linears import stacked_parameters
from rco.testing.search_cases import sampled_gates

CPU = torch.device("cpu")


class HostStream(OptionStream):
    """Copies at once, and spoils what it had brought before: nobody may read it any more."""

    fetched = 0

    def __init__(self, device):
        self.device = device
        self._layers, self._latest, self._brought = [], None, None

    def restart(self):
        self._latest = None

    def fetch(self, layer, option):
        source, request = self._layers[layer], (layer, option)
        if request != self._latest:
            if self._brought is not None:
                self._brought.fill_(0x7F)
            start, stop = source.span(option)
            self._brought = torch.full((source.host.nbytes,), 0x7F, dtype=torch.uint8)
            self._brought[start:stop] = source.host[start:stop]
            self._latest = request
            type(self).fetched += 1
        return source.views(self._brought, option)


def samples_of(case):
    with case.backend.objective(case.data) as objective:
        return [objective.enqueue(gates, batch)() for batch, gates in enumerate(sampled_gates(case, 3))]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("prune", [False, True], ids=["widths", "widths-and-pruning"])
def test_streamed_experts_give_the_samples_of_resident_ones(prune, checkpointing, tmp_path, monkeypatch):
    case = experts_case(tmp_path, CPU, torch.float32, prune=prune)
    case.backend.checkpointing = checkpointing
    wanted = samples_of(case)
    monkeypatch.setattr("rco.compression.compression.OptionStream", HostStream)
    monkeypatch.setattr(HostStream, "fetched", 0)
    case.backend.memory = "offload"
    case.backend.forget_candidates()
    found = samples_of(case)
    for (loss, gradient), (expected, slope) in zip(found, wanted, strict=True):
        assert loss == expected
        assert torch.equal(gradient, slope)
    # Both stacks of a layer at once: in the forward pass, again in a checkpoint's, and one time for all that the
    # backward pass asks; attention's four linears twice (chosen, all), the first of them again in a checkpoint.
    layers, samples = 2, len(wanted)
    assert HostStream.fetched <= samples * layers * ((2 + checkpointing) + 4 * (3 + checkpointing))
    assert len({option.packed.untyped_storage().data_ptr() for name, options in case.backend.packed().items()
                if "layers.0.mlp.experts" in name for option in options.values()}) == 1  # fmt: skip


def test_samples_do_not_read_originals_that_were_moved_away(tmp_path):
    case = experts_case(tmp_path, CPU, torch.float32, prune=False, widths=(2, 4))
    wanted = samples_of(case)
    with case.backend.objective(case.data) as objective:
        for info in case.backend.plan.packed_alone:
            weights = stacked_parameters(info.layer) if info.role == "experts" else [info.module.weight]
            for weight in weights:
                weight.data = torch.full_like(weight, torch.nan)
        found = [objective.enqueue(gates, batch)() for batch, gates in enumerate(sampled_gates(case, 3))]
    for (loss, gradient), (expected, slope) in zip(found, wanted, strict=True):
        assert loss == expected
        assert torch.equal(gradient, slope)


def test_experts_are_recorded_though_their_originals_are_in_host_memory(tmp_path, monkeypatch):
    case = experts_case(tmp_path, CPU, torch.float32, prune=False, widths=(2, 4))
    away = []

    @contextmanager
    def without_originals(backend):
        away.append(True)
        yield

    monkeypatch.setattr(type(case.backend), "_without_originals", without_originals)
    monkeypatch.setattr(Recording, "possible", lambda model: not away)
    monkeypatch.setattr(LayerOptions, "chosen_decoder", lambda options, dtype: print)
    with case.backend.objective(case.data) as objective:
        assert away
        assert objective.recordable


def test_what_is_fetched_together_lies_side_by_side(tmp_path):
    case = experts_case(tmp_path, CPU, torch.float32, prune=False)
    packed = case.backend.packed()
    names = [name for name in packed if "layers.1.mlp.experts" in name]
    assert len(names) == 2
    moved = pinned_together({name: packed[name] for name in names})
    assert {name: list(options) for name, options in moved.items()} == {
        name: list(packed[name]) for name in names
    }
    for name in names:
        for label, option in moved[name].items():
            assert torch.equal(option.dequantize(), packed[name][label].dequantize())
