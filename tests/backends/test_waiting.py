"""The samples of a step ask nothing of a GPU before all of them are launched, seen without a GPU."""

from contextlib import nullcontext

import pytest
import torch
from expert_cases import experts_case
from pretend_gpu import GPU, pretend_gpu

from rco.backends.quantization import QuantizationBackend
from rco.studies.step_bench import sampled_gates
from rco.studies.step_cases import make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu sees the same on the real one")

CPU = torch.device("cpu")


def case_of(kind, folder):
    if kind in ("quick", "quick-moe"):
        return make_case(kind, CPU, length=12, group=32)
    return experts_case(folder, CPU, torch.float32, prune=kind == "experts-pruned", length=12)


def moved(case):
    """Put a case on the GPU: the model, and its packed options."""
    case.loaded.model.to(GPU)
    if isinstance(case.backend, QuantizationBackend):
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
    case = case_of(kind, tmp_path)
    case.backend.checkpointing = checkpointing
    case.data.mask[:, :3] = False
    requests = [(gates, batch) for batch, gates in enumerate(sampled_gates(case, 2))]
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)() for request in requests]
    # Parking moves parameters to the host for good, which pretended ones cannot.
    monkeypatch.setattr("rco.backends.quantization.parked", lambda modules: nullcontext())
    with pretend_gpu(monkeypatch) as gpu:
        moved(case)
        with case.backend.objective(case.data) as objective:
            with gpu.watched() as waits:
                answers = [objective.enqueue(*request) for request in requests]
                with torch.no_grad():
                    losses = [objective.loss(*request) for request in requests]
            assert waits == []
            for answer, loss, (expected, gradient) in zip(answers, losses, wanted, strict=True):
                found = answer()
                assert found[0] == pytest.approx(expected, rel=1e-3, abs=1e-6)
                torch.testing.assert_close(found[1], gradient, rtol=1e-3, atol=1e-6)
                assert float(loss) == pytest.approx(expected, rel=1e-3, abs=1e-6)
            # A gradient of gates in host memory has to come down: the watch sees that.
            with gpu.watched() as waits:
                leaf = requests[0][0].clone().requires_grad_()
                torch.autograd.grad(objective.loss(leaf, 0), leaf)
            assert waits
