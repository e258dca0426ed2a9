"""A sample of the search on a GPU: the same wherever its options are, without waiting, in the memory expected."""

import warnings

import pytest
import torch

from rco.compressors.streaming import pinned
from rco.studies.step_bench import _expected, run, run_memory, sample_of
from rco.studies.step_cases import make_case, measure

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def offloaded(packed):
    return {
        name: dict(zip(options, pinned([o.to("cpu") for o in options.values()]), strict=True))
        for name, options in packed.items()
    }


def test_resident_and_streamed_samples_agree_bit_for_bit_and_leave_the_model_alone():
    first = make_case("quick", CUDA, length=96, group=32)
    before = {name: tensor.clone() for name, tensor in first.loaded.model.state_dict().items()}
    with sample_of(first) as work:
        wanted = [work()[0] for _ in range(2)][1]
    for checkpointing in (False, True):
        again = make_case(
            "quick", CUDA, length=96, group=32, loaded=first.loaded, checkpointing=checkpointing,
            memory="offload", packed=offloaded(first.backend.packed()),
        )  # fmt: skip
        with sample_of(again) as work:
            for _ in range(3):
                (found,) = work()
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
                if not checkpointing:
                    assert torch.equal(found, wanted)
    after = first.loaded.model.state_dict()
    assert all(torch.equal(tensor, after[name]) and after[name].is_cuda for name, tensor in before.items())


def test_gradients_are_those_of_the_cpu_in_float32():
    case = make_case("quick", CUDA, length=64, group=32)
    with sample_of(case) as work:
        (found,) = work()
    here = case.loaded.model.cpu().float()
    packed = {n: {k: w.to("cpu") for k, w in o.items()} for n, o in case.backend.packed().items()}
    other = make_case("quick", torch.device("cpu"), length=64, group=32, loaded=case.loaded, packed=packed)
    assert next(here.parameters()).dtype == torch.float32
    with sample_of(other) as work:
        (wanted,) = work()
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_a_sample_waits_for_the_device_once_at_its_end():
    case = make_case("quick", CUDA, length=96, group=32)
    with sample_of(case) as work:
        work()
        work()
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]
    # transformers asks once whether sequences are packed, before anything has been launched.
    waits = [place for place in waits if "masking_utils" not in place]
    assert len(waits) <= 1, "\n".join(waits)


@pytest.mark.parametrize("shape", ["quick", "quick-moe"])
def test_bench_step_runs_on_a_gpu(shape):
    report = run(shape, device="cuda", length=64, samples=2, steps=1, repeats=2)
    assert report["plain"]["ratio"] > 0
    assert report["plain"]["sample"]["peak_bytes"] > 0


def test_bench_memory_runs_and_checkpointing_and_streaming_take_less():
    report = run_memory("llama3-8b", layers=2, length=512, repeats=1)
    rows = {(row["memory"], row["checkpointing"]): row for row in report["modes"]}
    assert rows["offload", True]["peak_bytes"] < rows["resident", True]["peak_bytes"]
    assert rows["resident", True]["peak_bytes"] < rows["resident", False]["peak_bytes"]
    assert report["reference"]["relative_error"] < 1e-5


def test_expected_memory_is_within_a_tenth_of_the_measured():
    case = make_case("llama3-8b", CUDA, length=1024, layers=4, sequences=1)
    with sample_of(case) as work:
        measured = measure(work, CUDA, 2).peak_bytes
    assert _expected(case, 1024, False, offload=False) == pytest.approx(measured, rel=0.1)
