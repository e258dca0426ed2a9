"""Checkpoints of mixtures of experts: what loads in stock transformers, and what vLLM looks for in them."""

import json
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.data.calibration import CalibrationSet
from rco.evaluation.size import read_headers
from rco.export import CompressedTensorsExporter, DenseExporter, validate_for_engine
from rco.export.compressed_tensors import quantization_config
from rco.export.expert_targets import one_scheme, written_schemes
from rco.export.exporter import ExportRequest
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.formats.removed import REMOVED
from rco.models.loading import _from_pretrained, wrap_model
from rco.models.moe.layers import MOE_ARCHITECTURES, moe_layers
from rco.models.moe.linears import ExpertLinear, model_linears
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_moe, tiny_tokens

ARCHITECTURES = [name for name in TINY_MOE_NAMES if "-" not in name]
# As long as the rows of every down projection, half of the others.
GROUP = 16

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, logging
logging.set_verbosity_error()
logging.disable_progress_bar()
tokens = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], (folder, report)
    assert type(model).__module__.startswith("transformers."), type(model)
    with torch.no_grad():
        torch.save(model.eval()(tokens).logits, folder + "/logits.pt")
"""


def text():
    tokens = tiny_tokens(0, 2, 12)
    return CalibrationSet(
        tokens, torch.ones_like(tokens, dtype=torch.bool), ("random",) * 2, "random", 0, "calibration"
    )


def make_backend(folder, name, **plan):
    loaded = wrap_model(tiny_moe(name))
    linears = model_linears(loaded.layout, loaded.model, include_head=True)
    settings = {"group_size": GROUP, "widths": (2, 3, 4), **plan}
    if name == "qwen2_moe":
        settings["skips"] = ["shared_expert"]  # rows of 24
    return Compression(
        loaded,
        make_plan(loaded.layout, linears, **settings),
        folder / "store",
        settings=CandidateSettings(method="rtn", clip="minmax", sweeps=0, batch_size=2),
    )


def random_allocation(backend, seed=0):
    rng = np.random.default_rng(seed)
    choices = np.array([backend.plan.widths.index(int(rng.choice(g.widths))) for g in backend.plan.groups])
    cost = int(backend.costs("size").matrix[np.arange(len(choices)), choices].sum())
    problem = backend.problem(Budget("size", Fraction(cost + backend.costs("size").fixed)))
    return problem.allocation(choices)


def evaluated(backend, allocation, tokens):
    with backend.apply(allocation) as applied:
        return applied.model(tokens).logits


def test_stock_transformers_gives_the_evaluated_logits(tmp_path):
    """A fresh interpreter that knows nothing of rco, no remote code: packed for it, and dense for any widths."""
    pytest.importorskip("compressed_tensors")
    tokens, expected = text().tokens, {}
    torch.save(tokens, tmp_path / "tokens.pt")
    for name in ARCHITECTURES:
        unpacked = [] if MOE_ARCHITECTURES[name].separable else ["experts=16"]
        for serve, locks, exporter in (
            ("transformers", unpacked, CompressedTensorsExporter()),
            ("vllm", ["experts=16"], CompressedTensorsExporter()),
            ("any", [], DenseExporter()),
        ):
            backend = make_backend(tmp_path / name / serve, name, serve=serve, locks=locks)
            backend.candidates(text())
            allocation = random_allocation(backend)
            folder = tmp_path / f"{name}-{serve}"
            source, weights = backend.deployed(allocation)
            exporter.export(
                ExportRequest(source, weights, folder, **({"engine": serve} if serve != "any" else {}))
            )
            assert not list(folder.glob("*.py"))
            expected[folder] = evaluated(backend, allocation, tokens)
    command = [sys.executable, "-c", LOAD, tmp_path / "tokens.pt", *expected]
    environment = {"PATH": "", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, logits in expected.items():
        torch.testing.assert_close(
            torch.load(folder / "logits.pt"),
            logits,
            rtol=1e-4,
            atol=1e-4,
            msg=lambda m, f=folder: f"{f.name}: {m}",
        )


def test_experts_of_several_widths_are_an_error_without_the_code_that_they_bring(tmp_path, monkeypatch):
    """Unpacked by one layer's scheme, the others would load as noise if that scheme were the narrower one."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TQDM_DISABLE", "1")
    pytest.importorskip("compressed_tensors")
    backend = make_backend(tmp_path, "qwen3_moe", serve="vllm")
    backend.candidates(text())
    assert len({info.layer.index for info in backend.plan.experts}) > 1
    for first, others in ((2, 4), (4, 2), (3, 4)):
        widths = [
            first if group.members[0].block == backend.plan.experts[0].block else others
            for group in backend.plan.groups
        ]
        cost = sum(
            int(row[backend.plan.widths.index(width)])
            for row, width in zip(backend.costs("bits").matrix, widths, strict=True)
        )
        problem = backend.problem(Budget("bits", Fraction(cost, backend.costs("bits").parameters)))
        allocation = problem.allocation([backend.plan.widths.index(width) for width in widths])
        source, weights = backend.deployed(allocation)
        folder = tmp_path / f"{first}-{others}"
        CompressedTensorsExporter().export(ExportRequest(source, weights, folder, engine="vllm"))
        with pytest.raises(RuntimeError, match="conversion"):
            AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_widths_and_pruning_load_with_the_code_that_they_bring(name, tmp_path, monkeypatch):
    """A width for every expert, or none: packed, in the bytes that were counted, with the evaluated logits."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TQDM_DISABLE", "1")
    pytest.importorskip("compressed_tensors")
    backend = make_backend(tmp_path, name, allow_prune=True)
    backend.candidates(text())
    allocation = random_allocation(backend, seed=3)
    assert REMOVED in backend.choice_of(allocation).values()
    source, weights = backend.deployed(allocation)
    summary = CompressedTensorsExporter().export(ExportRequest(source, weights, tmp_path / "out"))
    size = backend.costs("size")
    assert summary.total_bytes <= size.fixed + int(
        size.matrix[np.arange(len(allocation)), np.array(list(allocation))].sum()
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(
        model.eval()(text().tokens).logits,
        evaluated(backend, allocation, text().tokens),
        rtol=1e-4,
        atol=1e-4,
    )


def test_dense_checkpoints_of_uneven_layers_bring_their_code(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TQDM_DISABLE", "1")
    backend = make_backend(tmp_path, "qwen3_moe", allow_prune=True)
    backend.candidates(text())
    allocation = random_allocation(backend, seed=3)
    source, weights = backend.deployed(allocation)
    DenseExporter().export(ExportRequest(source, weights, tmp_path / "out"))
    assert len({layer.num_experts for layer in moe_layers(source.model)}) > 1
    expected = evaluated(backend, allocation, text().tokens)
    for model in (
        _from_pretrained(tmp_path / "out", "pruned"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True),
    ):
        torch.testing.assert_close(model.eval()(text().tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_stock_transformers_cannot_unpack_is_refused_at_once(tmp_path):
    for serve in ("transformers", "vllm"):
        with pytest.raises(ValueError, match=f"`serve='{serve}'` cannot unpack experts of gpt_oss"):
            make_backend(tmp_path, "gpt_oss", serve=serve)
    with pytest.raises(ValueError, match="does not support zero points in experts"):
        make_backend(tmp_path, "olmoe", serve="transformers", symmetric=False)
    plan = make_backend(tmp_path, "olmoe", serve="transformers").plan
    assert sum(group.members[0].role == "experts" for group in plan.groups) == 1
    assert "model.layers.*.mlp.experts" in [group.name for group in plan.groups]


@pytest.mark.parametrize("serve", ["transformers", "vllm"])
def test_rows_that_would_have_other_scales_are_refused_at_once(serve, tmp_path):
    """One scale for the 16 columns of a down projection, two for the 32 of the others: two schemes in one."""
    widths = (4, 8)
    with pytest.raises(ValueError, match="`group_size` 16 or less"):
        make_backend(tmp_path, "olmoe", serve=serve, widths=widths, group_size=24)
    for size in (GROUP, 32, None):
        plan = make_backend(tmp_path, "olmoe", serve=serve, widths=widths, group_size=size).plan
        loaded = wrap_model(tiny_moe("olmoe"))
        schemes = {info.name: IntegerGrid(4, plan.group_size, plan.symmetric) for info in plan.linears}
        config = quantization_config(loaded, schemes, patterns=True)
        described = {"model_type": "olmoe", "quantization_config": config}
        assert validate_for_engine(described, serve, list(schemes)) == []


def vllm_names(layer):
    """What vLLM 0.32 looks up for a sparse block: the first expert, under its own name of the block."""
    return [f"{layer.stored_name}.experts.0.{part}" for part in layer.architecture.projections]


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if MOE_ARCHITECTURES[n].separable])
def test_vllm_finds_one_scheme_and_every_tensor_of_each_layer(name, tmp_path):
    backend = make_backend(tmp_path, name, serve="vllm", locks=["layers.2.mlp.experts=16"])
    backend.candidates(text())
    allocation = random_allocation(backend, seed=1)
    source, weights = backend.deployed(allocation)
    CompressedTensorsExporter().export(ExportRequest(source, weights, tmp_path / "out", engine="vllm"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = read_headers(tmp_path / "out")
    widths = {name: option.bits for name, option in backend.choice_of(allocation).items()}

    def matches(value, targets):
        return [t for t in targets if (re.match(t[3:], value) if t.startswith("re:") else t == value)]

    for layer in moe_layers(source.model):
        width = widths[f"{layer.experts_name}.0.{layer.architecture.projections[0]}"]
        for wanted in vllm_names(layer):
            found = [g["weights"] for g in config["config_groups"].values() if matches(wanted, g["targets"])]
            if width == 16:
                assert matches(wanted, config["ignore"])
                assert f"{wanted}.weight" in stored
            else:
                assert [w["num_bits"] for w in found] == [width]
                assert found[0]["group_size"] == GROUP
                assert f"{wanted}.weight_packed" in stored
        assert any(key.startswith(f"{layer.stored_name}.{layer.architecture.router}.") for key in stored)


def test_mixtral_is_stored_under_the_names_of_its_checkpoints(tmp_path, monkeypatch):
    """Tensors, costs and all three loaders: rco, remote code, and the stock model where experts share a scheme."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TQDM_DISABLE", "1")
    pytest.importorskip("compressed_tensors")
    tokens = text().tokens
    for serve in ("any", "vllm", "transformers"):
        backend = make_backend(tmp_path / serve, "mixtral", serve=serve)
        backend.candidates(text())
        allocation = random_allocation(backend)
        source, weights = backend.deployed(allocation)
        folder = tmp_path / f"out-{serve}"
        summary = CompressedTensorsExporter().export(ExportRequest(source, weights, folder, engine=serve))
        names = read_headers(folder)
        assert not any(".mlp." in name for name in names)
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight_packed" in names
        assert "model.layers.0.block_sparse_moe.gate.weight" in names
        size = backend.costs("size")
        counted = int(size.matrix[np.arange(len(allocation)), np.array(list(allocation))].sum()) + size.fixed
        assert summary.total_bytes <= counted < summary.total_bytes + 24 * (len(names) + 8)
        expected = evaluated(backend, allocation, tokens)
        code = serve != "transformers"
        assert bool(list(folder.glob("*.py"))) == code
        for model in (
            _from_pretrained(folder, "mixtral"),  # rco's own way, without a tokenizer
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=code),
        ):
            torch.testing.assert_close(model.eval()(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_patterns_name_what_the_names_do(seed):
    """Whatever shares a scheme: with patterns every linear has the scheme that it has by name, and no other."""
    rng = np.random.default_rng(seed)
    name = ["olmoe", "mixtral", "qwen2_moe", "deepseek_v3", "qwen3_moe", "glm4_moe"][seed]
    loaded = wrap_model(tiny_moe(name))
    linears = model_linears(loaded.layout, loaded.model)
    offered = [
        IntegerGrid(4, GROUP, symmetric=True),
        IntegerGrid(4, None, symmetric=True),
        IntegerGrid(3, GROUP, symmetric=True),
        IntegerGrid(2, 8, False),
        ORIGINAL,
    ]
    by_layer = {layer.index: offered[rng.integers(len(offered))] for layer in moe_layers(loaded.model)}
    schemes = {}
    for info in linears:
        scheme = offered[rng.integers(len(offered))]
        if isinstance(info, ExpertLinear) and info.layer.index != seed % 3:
            scheme = by_layer[info.layer.index]
        schemes[info.name] = scheme
    exact, short = (quantization_config(loaded, schemes, patterns=on) for on in (False, True))
    described = {"model_type": name, "quantization_config": short}
    assert not [v for v in validate_for_engine(described, "transformers", list(schemes)) if "matched" in v]
    count = {id(c): sum(len(g["targets"]) for g in c["config_groups"].values()) for c in (exact, short)}
    assert count[id(short)] <= count[id(exact)]
    for group, other in zip(exact["config_groups"].values(), short["config_groups"].values(), strict=True):
        assert group["weights"] == other["weights"]
        named = set(group["targets"])
        for linear in schemes:
            hit = any(
                re.match(t[3:], linear) if t.startswith("re:") else t == linear for t in other["targets"]
            )
            assert hit == (linear in named), (linear, other["targets"])


def test_one_scheme_is_symmetric_and_of_every_expert():
    loaded = wrap_model(tiny_moe("olmoe"))
    linears = model_linears(loaded.layout, loaded.model)

    def stacks(**changed):
        schemes = (
            dict.fromkeys((info.name for info in linears), IntegerGrid(4, GROUP, symmetric=True)) | changed
        )
        return one_scheme(linears, written_schemes(linears, schemes))

    first = next(info.name for info in linears if isinstance(info, ExpertLinear))
    assert stacks() == IntegerGrid(4, GROUP, symmetric=True)
    assert stacks(**{linears[0].name: IntegerGrid(2, symmetric=True)}) == IntegerGrid(
        4, GROUP, symmetric=True
    )  # attention has widths of its own
    assert stacks(**{first: IntegerGrid(3, GROUP, symmetric=True)}) is None
    assert stacks(**{first: ORIGINAL}) is None
    zeros = dict.fromkeys((info.name for info in linears), IntegerGrid(4, GROUP, False))
    assert stacks(**zeros) is None
    layer = [i.name for i in linears if isinstance(i, ExpertLinear) and i.layer.index == 1]
    assert stacks(**dict.fromkeys(layer, ORIGINAL)) == IntegerGrid(
        4, GROUP, symmetric=True
    )  # a layer left alone stays stacked


def test_candidates_do_not_depend_on_what_is_tied(tmp_path):
    """Presets and groupings on one grid share a store: the same linears in the same order."""
    plain = {"widths": (4, 8), "symmetric": True}
    kinds = [
        {},
        {"experts": "projection"},
        {"experts": "layer-projection"},
        {"serve": "vllm"},
        {"serve": "transformers"},
        {"allow_prune": True},
        {"locks": ["attention=16"], "ties": ["q_proj,o_proj"]},
    ]
    backends = [make_backend(tmp_path, "olmoe", **plain, **kind) for kind in kinds]
    backends[0].candidates(text())
    for backend in backends[1:]:
        backend.check_store(text())  # refuses candidates that were made differently
        backend.candidates(text())
        assert backend.store.complete
    assert len({tuple(i.name for i in b.plan.linears) for b in backends}) == 1
    names = [{m.name for group in b.plan.groups for m in group.members} for b in backends]
    assert all(found == {i.name for i in backends[0].plan.linears} for found in names)
