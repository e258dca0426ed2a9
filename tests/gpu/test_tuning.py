"""Tuning on a GPU: steps are recorded as a CUDA graph, of experts too, and replayed to the same result."""

from dataclasses import replace

import pytest
import torch
from tuning_cases import QUICK, Case

from rco.compression import tuning
from rco.compression.cuda_graphs import Recording
from rco.formats import parse
from rco.testing.tiny_models import tiny_model, tiny_moe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "floating point", "qwen3_moe", "gpt_oss", "mixtral"])
def test_steps_are_recorded_and_replayed_to_the_same_result(tmp_path, name, dtype, half, monkeypatch, caplog):
    replays = []

    class Counted(Recording):
        def __call__(self, *inputs):
            replays.append(1)
            return super().__call__(*inputs)

    monkeypatch.setattr(tuning, "Recording", Counted)
    if name == "floating point":
        formats = {"widths": (), "formats": [parse("nvfp4-a4"), parse("fp8-dynamic")]}
        case = Case(tmp_path, tiny_model("llama").to("cuda", torch.bfloat16), dtype=dtype, **formats)
    else:
        model = tiny_model("llama") if name == "llama" else tiny_moe(name)
        case = Case(tmp_path, model.to("cuda"), dtype=dtype, symmetric=True, widths=(3, 4))
    settings = replace(QUICK, at_once=2, half=half)
    found = case.run(settings)
    assert not any("recorded" in message for message in caplog.messages)
    assert len(replays) == settings.steps(case.text.length) - 3  # two steps before the one that is recorded
    launched = case.run(replace(settings, graphs=False))
    assert found.before == pytest.approx(launched.before, rel=1e-5)
    assert found.curve[-1]["selection"] == pytest.approx(
        launched.curve[-1]["selection"], rel=1e-3 if dtype == torch.float32 else 0.05
    )
