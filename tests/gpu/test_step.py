"""A sample of the search on a GPU: the same wherever its options are, without waiting, in the memory expected."""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
from embedding_cases import embeddings_case
from expert_cases import experts_case

from rco import formats
from rco.bench.step_bench import expected_bytes, run, run_memory
from rco.bench.timing import measure
from rco.core.async_copy import send
from rco.formats.streaming import pinned
from rco.losses import chunked_kl
from rco.models.shapes import random_model
from rco.testing.search_cases import make_case, sample_of, sampled_gates

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def offloaded(packed):
    return {
        name: dict(zip(options, pinned([o.to("cpu") for o in options.values()]), strict=True))
        for name, options in packed.items()
    }


def test_resident_and_streamed_samples_agree_bit_for_bit_and_leave_the_model_alone():
    first = make_case("quick", CUDA, length=96, group=32)
    first.backend.graphs = False  # recorded, cuBLAS may multiply in another order
    before = {name: tensor.clone() for name, tensor in first.loaded.model.state_dict().items()}
    with sample_of(first) as work:
        wanted = [work() for _ in range(2)][1]
    for checkpointing in (False, True):
        again = make_case(
            "quick", CUDA, length=96, group=32, loaded=first.loaded, checkpointing=checkpointing,
            memory="offload", packed=offloaded(first.backend.packed()),
        )  # fmt: skip
        with sample_of(again) as work:
            for _ in range(3):
                found = work()
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
                if not checkpointing:
                    assert torch.equal(found, wanted)
    after = first.loaded.model.state_dict()
    assert all(torch.equal(tensor, after[name]) and after[name].is_cuda for name, tensor in before.items())


@pytest.mark.parametrize("prune", [False, True])
def test_experts_that_are_streamed_give_the_samples_of_resident_ones(prune, tmp_path):
    case = experts_case(tmp_path, CUDA, torch.bfloat16, prune=prune)
    found = []
    for memory in ("resident", "offload"):
        case.backend.memory = memory
        case.backend.forget_candidates()
        with case.backend.objective(case.data) as objective:
            requests = [(gates, batch) for batch, gates in enumerate(sampled_gates(case, 4))]
            answers = [objective.enqueue(*request) for _ in range(2) for request in requests]
            found.append([answer() for answer in answers])
    for (loss, gradient), (expected, slope) in zip(*found, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-7)


def test_gradients_are_those_of_the_cpu_in_float32():
    case = make_case("quick", CUDA, length=64, group=32)
    with sample_of(case) as work:
        found = work()
    here = case.loaded.model.cpu().float()
    packed = {n: {k: w.to("cpu") for k, w in o.items()} for n, o in case.backend.packed().items()}
    other = make_case("quick", torch.device("cpu"), length=64, group=32, loaded=case.loaded, packed=packed)
    assert next(here.parameters()).dtype == torch.float32
    with sample_of(other) as work:
        wanted = work()
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def any_case(kind, tmp_path):
    if kind in ("quick", "quick-moe"):
        return make_case(kind, CUDA, length=96, group=32)
    if kind == "streamed":
        return make_case("quick", CUDA, length=96, group=32, memory="offload")
    if kind.endswith("embedding"):
        tied = kind == "tied embedding"
        return embeddings_case(CUDA, torch.float32 if tied else torch.bfloat16, tied=tied)
    case = experts_case(tmp_path, CUDA, torch.bfloat16, prune=kind == "experts-pruned")
    if kind == "experts-streamed":
        case.backend.memory = "offload"
        case.backend.forget_candidates()
    return case


@contextmanager
def no_waiting():
    """Inside, a call that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    try:
        watch_for_waiting("error")
        yield
    finally:
        watch_for_waiting("default")


def watch_for_waiting(mode):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "kind",
    [
        "quick", "streamed", "experts", "experts-pruned", "experts-streamed", "quick-moe", "own embedding",
        "tied embedding",
    ],
)  # fmt: skip
def test_the_samples_of_a_step_are_launched_without_waiting(kind, checkpointing, tmp_path):
    case = any_case(kind, tmp_path)
    case.backend.checkpointing, case.backend.graphs = checkpointing, False
    case.data.mask[:, :7] = False  # positions that do not count are found without asking, too
    gates = sampled_gates(case, 4)
    with case.backend.objective(case.data) as objective:
        requests = [(each, batch) for batch, each in enumerate(gates)]
        wanted = [objective.enqueue(*request)() for request in requests]  # compiles, and waits after each
        with no_waiting():
            answers = [objective.enqueue(*request) for request in requests]
            # Experts without options and without gradient run transformers' code, which is not ours to promise for.
            quiet = kind != "quick-moe"
            with torch.no_grad():
                losses = [objective.loss(*request) for request in requests if quiet]
        assert [float(loss) for loss in losses] == pytest.approx(
            [loss for loss, _ in wanted if quiet], rel=1e-2
        )
        for answer, (loss, gradient) in zip(answers, wanted, strict=True):
            found = answer()
            assert found[0] == pytest.approx(loss, rel=1e-5)
            assert found[1].device.type == "cpu"
            assert float((found[1] - gradient).norm() / gradient.norm()) < 1e-3


# Recorded, cuBLAS may multiply in another order: rounding to bfloat16 then falls out differently, above all for a
# tiny model, whose losses are small. The last two compute in float32.
NEAR = {
    "recorded": (1e-4, 0.03), "quick-moe": (1e-4, 0.03), "experts": (1e-4, 0.03), "experts-pruned": (1e-4, 0.03),
    "own embedding": (0.05, 0.2), "tied embedding": (1e-3, 1e-3), "several groups": (1e-3, 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(("kind", "near"), NEAR.items(), ids=NEAR)
def test_replayed_samples_are_those_that_are_launched_and_nobody_waits_for_them(
    kind, near, checkpointing, tmp_path
):
    case = recorded_case(kind, tmp_path)
    case.backend.checkpointing = checkpointing
    requests = [(each, number % 3) for number, each in enumerate(sampled_gates(case, 6))]
    case.backend.graphs = False
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)() for request in requests]
        assert not objective.recorded
    case.backend.graphs = True
    with case.backend.objective(case.data) as objective:
        for request in requests[:3]:
            objective.enqueue(*request)()
        assert objective.recorded
        for _ in range(2):
            with no_waiting():
                answers = [objective.enqueue(*request) for request in requests]
            for answer, (loss, gradient) in zip(answers, wanted, strict=True):
                found = answer()
                assert found[0] == pytest.approx(loss, rel=near[0])
                assert float((found[1] - gradient).norm() / gradient.norm()) < near[1]
        assert len({loss for loss, _ in wanted}) == len(wanted)  # else nothing would have been told apart
        with pytest.raises(ValueError, match=r"one-hot|0 or 1"):
            objective.enqueue(torch.full_like(requests[0][0], 0.4), 0)
    assert not objective.recorded


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_samples_with_rounded_inputs_are_recorded(checkpointing):
    names = ("nvfp4-a4", "fp8-dynamic", "original")
    case = make_case("quick", CUDA, length=96, formats=[formats.parse(name) for name in names])
    case.backend.checkpointing = checkpointing
    requests = [(each, number % 3) for number, each in enumerate(sampled_gates(case, 6))]
    case.backend.graphs = False
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)()[0] for request in requests]
    case.backend.graphs = True
    with case.backend.objective(case.data) as objective:
        for request in requests[:3]:
            objective.enqueue(*request)()
        assert objective.recorded
        with no_waiting():
            answers = [objective.enqueue(*request) for request in requests]
        # A sum in another order may round an input otherwise, to a neighbour that is far away at four bits.
        assert [answer()[0] for answer in answers] == pytest.approx(wanted, rel=0.05)


def recorded_case(kind, folder):
    if kind.endswith("embedding"):
        return any_case(kind, folder)
    if kind == "several groups":
        names = ("int2-g32", "int4-g64", "int8-channel", "original")
        loaded = random_model("quick", device=CUDA, dtype=torch.float32)
        options = [formats.parse(name) for name in names]
        return make_case("quick", CUDA, length=96, loaded=loaded, formats=options)
    # Of experts, rows of whole groups of 128 columns in bfloat16 are decoded by a choice on the device.
    if kind.startswith("experts"):
        prune = kind == "experts-pruned"  # which reads original weights; without, they are in host memory
        widths = (2, 4, 16) if prune else (2, 4)
        return experts_case(
            folder, CUDA, torch.bfloat16, prune=prune, shape="olmoe", group=128, layers=1, widths=widths
        )
    if kind == "quick-moe":
        return make_case(kind, CUDA, length=96)
    return make_case("llama3-8b", CUDA, length=96, layers=2)


def all_kept(case):
    """Gates that prune no expert."""
    return torch.eye(2, dtype=torch.float64)[1].expand(case.problem.num_groups, 2).contiguous()


def test_a_recording_without_room_for_a_sample_is_made_anew():
    case = make_case("quick-moe", CUDA, length=96)
    gates = sampled_gates(case, 4)
    case.backend.graphs = False
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(each, 0)()[1] for each in gates]
    case.backend.graphs = True
    with case.backend.objective(case.data) as objective:
        objective.enqueue(all_kept(case), 0)()  # needs no room at all
        for each, gradient in zip(gates, wanted, strict=True):
            found = objective.enqueue(each, 0)()[1]
            assert float((found - gradient).norm() / gradient.norm()) < 1e-3
        assert objective.samples_redone > 0
        before = objective.samples_redone
        for each in gates:
            objective.enqueue(each, 0)()
        assert objective.recorded
        assert objective.samples_redone == before


def test_what_is_sent_arrives_though_its_memory_is_used_again():
    busy = torch.randn(4096, 4096, device=CUDA)
    with no_waiting():
        for _ in range(20):
            busy = busy @ busy / 64  # so that the copies come late
        sent = [send(torch.full((5000,), number), CUDA) for number in range(200)]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(sent))


@pytest.mark.parametrize("kind", ["experts-pruned", "quick-moe"])
def test_probes_that_nobody_counted_give_the_gradient_of_counted_ones(kind, tmp_path):
    case = any_case(kind, tmp_path)
    with case.backend.objective(case.data) as objective:
        for gates in sampled_gates(case, 3):
            leaf = gates.clone().requires_grad_()
            (counted,) = torch.autograd.grad(objective.loss(leaf, 0), leaf)
            _, found = objective.enqueue(gates, 0)()
            torch.testing.assert_close(found, counted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "job"), [("quick", None), ("quick-moe", "prune"), ("quick-moe", "quantize")]
)
def test_bench_step_runs_on_a_gpu(shape, job):
    report = run(shape, device="cuda", length=64, samples=2, steps=1, repeats=2, job=job)
    assert report["plain"]["ratio"] > 0
    assert report["plain"]["sample"]["peak_bytes"] > 0


def test_bench_memory_runs_and_checkpointing_and_streaming_take_less():
    report = run_memory("llama3-8b", layers=2, length=512, repeats=1)
    rows = {(row["memory"], row["checkpointing"]): row for row in report["modes"]}
    assert rows["offload", True]["peak_bytes"] < rows["resident", True]["peak_bytes"]
    assert rows["resident", True]["peak_bytes"] < rows["resident", False]["peak_bytes"]
    assert report["reference"]["relative_error"] < 1e-5


def test_expected_memory_is_within_a_tenth_of_the_measured():
    gc.collect()
    torch.cuda.empty_cache()  # options must not fill the holes of what other tests have left
    case = make_case("llama3-8b", CUDA, length=1024, layers=4, sequences=1)
    for graphs in (False, True):
        case.backend.graphs = graphs
        with sample_of(case) as work:
            measured = measure(work, CUDA, 2).peak_bytes
        assert expected_bytes(case, 1024, False, offload=False) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("job", ["prune", "quantize"])
def test_expected_memory_of_experts_is_within_a_tenth_of_the_measured(job):
    gc.collect()
    torch.cuda.empty_cache()
    case = make_case("olmoe", CUDA, length=2048, layers=4, sequences=1, job=job)
    for checkpointing in (False, True):
        case.backend.checkpointing = checkpointing
        with sample_of(case) as work:
            measured = measure(work, CUDA, 2).peak_bytes
        assert expected_bytes(case, 2048, checkpointing, offload=False) == pytest.approx(measured, rel=0.1)


def test_what_cannot_be_recorded_is_launched_and_right(monkeypatch, caplog):
    """A host that looks at a number while a graph is captured breaks the capture, and nothing else."""
    case = make_case("llama3-8b", CUDA, length=96, layers=2)
    requests = [(each, number) for number, each in enumerate(sampled_gates(case, 3))]
    case.backend.graphs = False
    with case.backend.objective(case.data) as objective:
        wanted = [objective.enqueue(*request)() for request in requests]
    case.backend.graphs = True

    def looking(*arguments, **settings):
        loss = chunked_kl(*arguments, **settings)
        if torch.cuda.is_current_stream_capturing():
            loss.detach().item()
        return loss

    monkeypatch.setattr("rco.compression.language_model_objective.chunked_kl", looking)
    with case.backend.objective(case.data) as objective:
        found = [objective.enqueue(*request)() for request in requests]
        assert not objective.recorded
    assert (
        torch.rand(3, device=CUDA).isfinite().all()
    )  # torch refuses to draw while it believes to be recording
    assert sum("could not be recorded" in record.message for record in caplog.records) == 1
    for (loss, gradient), (expected, slope) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert float((gradient - slope).norm() / slope.norm()) < 1e-3
