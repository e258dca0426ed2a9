"""The samples of a step ask nothing of a GPU before all of them are launched, seen without a GPU."""

from contextlib import nullcontext

import pytest
import torch
from choices_on_device import decoder_by_place
from embedding_cases import embeddings_case
from expert_cases import experts_case
from pretend_gpu import GPU, pretend_gpu

from rco.compression.compression import Compression
from rco.formats.switchable import LayerOptions
from rco.models.loading import wrap_model
from rco.testing.search_cases import make_case, sampled_gates
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_model, tiny_moe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu sees the same on the real one")

CPU = torch.device("cpu")


def case_of(kind, folder):
    if kind in ("quick", "quick-moe"):
        return make_case(kind, CPU, length=12, group=32)
    return experts_case(folder, CPU, torch.float32, prune=kind == "experts-pruned", length=12)


def moved(case):
    """Put a case on the GPU: the model, and its packed options."""
    case.loaded.model.to(GPU)
    if isinstance(case.backend, Compression):
        packed = case.backend.packed()
        case.backend.set_packed({n: {k: w.to(GPU) for k, w in o.items()} for n, o in packed.items()})


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        ("quick", False),
        ("experts-pruned", True),
        ("quick-moe", False),
        ("quick-moe", True),
    ],
)
def test_samples_are_launched_without_waiting(kind, checkpointing, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "rco.testing.search_cases.WIDTHS", (3, 8)
    )  # every operation of a pretended GPU is slow
    case = case_of(kind, tmp_path)
    case.backend.checkpointing = checkpointing
    case.data.mask[:, :3] = False
    requests = [(gates, batch) for batch, gates in enumerate(sampled_gates(case, 2))]
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)() for request in requests]
    # Parking moves parameters to the host for good, which pretended ones cannot.
    monkeypatch.setattr("rco.compression.compression.parked", lambda modules: nullcontext())
    with pretend_gpu(monkeypatch) as gpu:
        moved(case)
        with case.backend.objective(case.data) as objective:
            with gpu.watched() as waits:
                answers = [objective.enqueue(*request) for request in requests]
                # Experts without options and without gradient run transformers' code, which waits in float32.
                quiet = kind != "quick-moe"
                with torch.no_grad():
                    losses = [objective.loss(*request) for request in requests if quiet]
            assert waits == []
            for answer, (expected, gradient) in zip(answers, wanted, strict=True):
                found = answer()
                assert found[0] == pytest.approx(expected, rel=1e-3, abs=1e-6)
                torch.testing.assert_close(found[1], gradient, rtol=1e-3, atol=1e-6)
            for loss, (expected, _) in zip(losses, wanted[: len(losses)], strict=True):
                assert float(loss) == pytest.approx(expected, rel=1e-3, abs=1e-6)
            # A gradient of gates in host memory has to come down: the watch sees that.
            with gpu.watched() as waits:
                leaf = requests[0][0].clone().requires_grad_()
                torch.autograd.grad(objective.loss(leaf, 0), leaf)
            assert waits


def tiny_case(model, job, monkeypatch):
    """A case of a few tokens and widths, as every operation of a pretended GPU is slow."""
    monkeypatch.setattr("rco.testing.search_cases.WIDTHS", (3, 8))
    loaded = wrap_model(model, name="tiny")
    return make_case("quick-moe", CPU, length=6, group=64, loaded=loaded, job=job)


def check_recording(case, monkeypatch, caplog):
    """Samples on a pretended GPU are recorded, and are those of the CPU."""
    requests = [(gates, batch) for batch, gates in enumerate(sampled_gates(case, 2))]
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)() for request in requests]
    monkeypatch.setattr("rco.compression.compression.parked", lambda modules: nullcontext())
    monkeypatch.setattr(LayerOptions, "chosen_decoder", decoder_by_place)
    with pretend_gpu(monkeypatch) as gpu:
        monkeypatch.setattr("rco.compression.cuda_graphs.captured", gpu.captured)
        moved(case)
        with case.backend.objective(case.data) as objective:
            found = [objective.enqueue(*request)() for request in requests]
            assert not any("recorded" in message for message in caplog.messages)
            assert objective.recorded
    for (loss, gradient), (expected, slope) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(expected, rel=1e-3, abs=1e-6)
        torch.testing.assert_close(gradient, slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", TINY_MOE_NAMES)
def test_pruning_is_recorded_on_every_architecture(name, monkeypatch, caplog):
    model = tiny_moe(name, num_hidden_layers=2, layer_types=None)
    check_recording(tiny_case(model, "prune", monkeypatch), monkeypatch, caplog)


# Kinds of blocks that differ in their code; tests/gpu has the whole table.
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_quantization_is_recorded(name, monkeypatch, caplog):
    case = tiny_case(tiny_model(name, num_hidden_layers=1), "quantize", monkeypatch)
    check_recording(case, monkeypatch, caplog)


@pytest.mark.parametrize("tied", [False, True], ids=["own embedding", "tied embedding"])
def test_embeddings_are_recorded(tied, monkeypatch, caplog):
    case = embeddings_case(CPU, torch.float32, tied=tied, length=6, layers=1)
    check_recording(case, monkeypatch, caplog)
