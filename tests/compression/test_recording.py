"""Recorded samples, seen without a GPU: they depend on what goes in anew with every replay, and on nothing else.

The stand-in for a recording runs the recorded work again. That work still has the host's numbers of the sample that
was recorded; had it read a choice off them, other gates would give that sample's results.
"""

import logging
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from choices_on_device import decoder_by_place
from embedding_cases import embeddings_case
from expert_cases import experts_case
from torch.utils._python_dispatch import TorchDispatchMode

from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.cuda_graphs import NumbersOnDevice, Recording
from rco.compression.plan import make_plan
from rco.formats.switchable import LayerOptions
from rco.testing.search_cases import WIDTHS, make_case, random_packed, sampled_gates

CPU = torch.device("cpu")
KEEP = 1


class RunAgain:
    """Stands in for a CUDA graph: a replay runs the work again and overwrites its outputs."""

    made = 0

    def __init__(self, work, device):
        type(self).made += 1
        self.work, self.outputs = work, work()

    @classmethod
    def captured(cls, work, device):
        graph = cls(work, device)
        return graph, graph.outputs

    def replay(self):
        for kept, found in zip(self.outputs, self.work(), strict=True):
            kept.copy_(found)


@pytest.fixture
def recorded(monkeypatch):
    """A machine that records: one GPU, graphs, and a kernel that decodes by a choice on the device."""
    monkeypatch.setattr(Recording, "possible", lambda model: True)
    monkeypatch.setattr("rco.compression.cuda_graphs.captured", RunAgain.captured)
    monkeypatch.setattr(LayerOptions, "chosen_decoder", decoder_by_place)
    RunAgain.made = 0
    return RunAgain


@contextmanager
def objective_of(case):
    with case.backend.objective(case.data) as objective:
        if objective.probe_buffer is not None:
            objective.probe_buffer.always_counted = False  # as on a GPU, where the host does not count probes
        yield objective


def case_of(kind, folder):
    """A case of a shape; ``locked``: the output layer and a linear have one width each, another is left alone."""
    if kind.startswith("experts"):
        return experts_case(folder, CPU, torch.float32, prune=kind == "experts-pruned")
    if kind.endswith("embedding"):
        return embeddings_case(CPU, torch.float32, tied=kind == "tied embedding", length=16)
    if kind != "locked":
        return make_case(kind, CPU, length=16, group=32)
    case = make_case("quick", CPU, length=16, group=32)
    linears = case.loaded.layout.linears(case.loaded.model, include_head=True)
    locks = ["head=4", "model.layers.0.mlp.down_proj=3", "model.layers.1.mlp.down_proj=16"]
    plan = make_plan(case.loaded.layout, linears, widths=WIDTHS, group_size=32, symmetric=False, locks=locks)
    backend = Compression(case.loaded, plan, Path("unused"))
    backend.set_packed(
        {
            info.name: {
                str(width): random_packed(info.out_features, info.in_features, width, 32, CPU)
                for width in WIDTHS
            }
            for info in plan.linears
        }
    )
    return replace(case, backend=backend, problem=backend.problem(Budget.parse(bits="6")))


def samples_of(case, requests, graphs):
    case.backend.graphs = graphs
    with objective_of(case) as objective:
        for gates, batch in requests[:2]:
            objective.enqueue(gates, batch)()
        answers = [objective.enqueue(*request) for request in requests]
        return [answer() for answer in answers], objective.recorded


@pytest.mark.parametrize(
    "kind",
    ["quick", "quick-moe", "locked", "experts", "experts-pruned", "own embedding", "tied embedding"],
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_replays_follow_the_gates_and_the_text_that_go_in(kind, checkpointing, recorded, tmp_path):
    case = case_of(kind, tmp_path)
    case.backend.checkpointing = checkpointing
    requests = [(gates, batch) for batch, gates in enumerate(sampled_gates(case, 4))]
    wanted, was_recorded = samples_of(case, requests, graphs=False)
    assert not was_recorded
    assert recorded.made == 0
    found, was_recorded = samples_of(case, requests, graphs=True)
    assert was_recorded
    assert recorded.made >= 1
    assert len({round(loss, 9) for loss, _ in wanted}) == len(wanted)
    for (loss, gradient), (expected, slope) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-8)


def all_kept(case):
    """Gates that prune no expert."""
    return torch.eye(2, dtype=torch.float64)[KEEP].expand(case.problem.num_groups, 2).contiguous()


def test_a_recording_without_room_for_a_sample_is_made_anew(recorded):
    case = make_case("quick-moe", CPU, length=200, group=32)
    gates = sampled_gates(case, 4)
    with objective_of(case) as objective:
        objective.enqueue(all_kept(case), 0)()  # needs no room at all
        for each in gates:
            leaf = each.clone().requires_grad_()
            (wanted,) = torch.autograd.grad(objective.loss(leaf, 0), leaf)
            torch.testing.assert_close(objective.enqueue(each, 0)()[1], wanted, rtol=1e-5, atol=1e-8)
        assert objective.samples_redone >= 1
        assert recorded.made >= 2


def test_sequences_that_count_in_parts_or_end_early_are_not_recorded(recorded):
    case = make_case("quick", CPU, length=16, group=32, sequences=3)
    (gates,) = sampled_gates(case, 1)
    case.backend.batch_size = 2  # the last batch is shorter
    with objective_of(case) as objective:
        objective.enqueue(gates, 1)()  # first of all, as may happen on any rank
        assert recorded.made == 0
        for _ in range(2):
            found = [objective.enqueue(gates, batch)() for batch in (0, 1)]
        assert recorded.made == 1
    with torch.no_grad(), objective_of(case) as objective:
        assert [loss for loss, _ in found] == pytest.approx([float(objective.loss(gates, b)) for b in (0, 1)])
    case.data.mask[0, :3] = False
    with objective_of(case) as objective:
        objective.enqueue(gates, 0)()
        assert recorded.made == 1


@pytest.mark.parametrize("kind", ["quick", "quick-moe"])
def test_replayed_gates_are_checked(kind, recorded):
    case = make_case(kind, CPU, length=16, group=32)
    (gates,) = sampled_gates(case, 1)
    with objective_of(case) as objective:
        for _ in range(2):
            objective.enqueue(gates, 0)()
        assert objective.recorded
        with pytest.raises(ValueError, match=r"one-hot|0 or 1"):
            objective.enqueue(torch.full_like(gates, 0.4), 0)


def test_what_cannot_be_recorded_is_said_and_launched_as_ever(recorded, monkeypatch, caplog):
    def refuse(work, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    case = make_case("quick", CPU, length=16, group=32)
    (gates,) = sampled_gates(case, 1)
    wanted, _ = samples_of(case, [(gates, 0)], graphs=False)
    monkeypatch.setattr("rco.compression.cuda_graphs.captured", refuse)
    with caplog.at_level(logging.WARNING):
        found, was_recorded = samples_of(case, [(gates, 0)], graphs=True)
    assert not was_recorded
    assert found[0][0] == wanted[0][0]
    assert sum("not permitted" in record.message for record in caplog.records) == 1


class Calls(TorchDispatchMode):
    """Lists what is asked of devices."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0.0, -1.5, 3, True])
@pytest.mark.parametrize("given", [{}, {"dtype": torch.bfloat16}], ids=["own", "bfloat16"])
def test_numbers_are_written_on_the_device_and_not_copied_there(number, given):
    wanted = torch.tensor(number, **given)
    with Calls() as calls, NumbersOnDevice():
        found = torch.tensor(number, device="cpu", **given)
        placed = torch.tensor(number, device=torch.device("meta"), **given)
    assert (found.dtype, found.shape, found.item()) == (wanted.dtype, wanted.shape, wanted.item())
    assert (placed.dtype, placed.shape, placed.device.type) == (wanted.dtype, wanted.shape, "meta")
    assert calls.names == ["full", "full"]


def test_other_calls_are_left_alone_where_numbers_are_written_on_the_device():
    with NumbersOnDevice():
        assert torch.tensor([1.0, 2.0], device="cpu").tolist() == [1.0, 2.0]
        assert torch.tensor(2).item() == 2
        assert torch.full((2,), 3.0, device="cpu").tolist() == [3.0, 3.0]
