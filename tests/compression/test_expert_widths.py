"""Widths of experts: groups, exact costs, candidates per expert, the switched model, the written checkpoint."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import rco
from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings, packed_candidate
from rco.compression.compression import Compression
from rco.compression.costs import Costs, Visits
from rco.compression.plan import make_plan
from rco.compression.second_order import steadied_losses
from rco.core.problem import InfeasibleBudgetError
from rco.data.calibration import CalibrationSet
from rco.evaluation.size import average_bits, checkpoint_size
from rco.export import CompressedTensorsExporter, DenseExporter, validate_for_engine
from rco.export.compressed_tensors import quantization_config
from rco.export.exporter import ExportRequest
from rco.formats.gptq import gptq
from rco.formats.integer import IntegerGrid
from rco.models.loading import load_model, wrap_model
from rco.models.moe.expert_statistics import ExpertHessians
from rco.models.moe.layers import moe_layers
from rco.models.moe.linears import ExpertLinear, expert_linears, model_linears
from rco.models.moe.routing import route
from rco.testing.tiny_models import TINY_MOE_NAMES, tiny_moe, tiny_tokens

ARCHITECTURES = [name for name in TINY_MOE_NAMES if "-" not in name]


def text(sequences=4, length=12, seed=0):
    tokens = tiny_tokens(seed, sequences, length)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    return CalibrationSet(tokens, mask, ("random",) * sequences, "random", seed, "calibration")


def make_backend(
    folder, name="qwen2_moe", dtype=torch.float32, method="rtn", count="all", visits=None, **plan
):
    loaded = wrap_model(tiny_moe(name, dtype=dtype))
    linears = model_linears(loaded.layout, loaded.model, include_head=True)
    settings = {"group_size": None, "widths": (2, 3, 4), "symmetric": True, **plan}
    backend = Compression(
        loaded,
        make_plan(loaded.layout, linears, **settings),
        folder / "store",
        settings=CandidateSettings(method=method, sweeps=0, batch_size=2, expert_tokens=8),
        count=count,
        visits=visits,
    )
    return backend


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_linears_of_experts_are_views_of_the_stacks(name):
    model = tiny_moe(name)
    loaded = wrap_model(model)
    linears = model_linears(loaded.layout, model, include_head=True)
    names = [info.name for info in linears]
    assert len(set(names)) == len(names)
    experts = [info for info in linears if isinstance(info, ExpertLinear)]
    assert len(experts) == sum(3 * layer.num_experts for layer in moe_layers(model))
    state = model.state_dict()
    for info in experts[:6]:
        assert tuple(info.weight.shape) == (info.out_features, info.in_features)
        assert info.weight.untyped_storage().data_ptr() == state[info.stored_in].untyped_storage().data_ptr()
    # Together they are all of the stacked tensors, each entry once.
    total = sum(info.parameters for info in experts)
    assert total == sum(state[key].numel() for key in {info.stored_in for info in experts})
    layer = experts[0].layer
    x = torch.randn(5, experts[0].in_features)
    gate, up, down = (info.weight for info in experts[:3])
    module = layer.experts
    both = torch.cat([x @ gate.T, x @ up.T], dim=-1)
    if layer.architecture.interleaved:
        both = torch.stack([x @ gate.T, x @ up.T], dim=-1).flatten(-2)
    if getattr(module, "has_bias", False):
        both = both + module.gate_up_proj_bias[0]
    expected = module._apply_gate(both) @ down.T
    if getattr(module, "has_bias", False):
        expected = expected + module.down_proj_bias[0]
    chosen = torch.zeros(5, 1, dtype=torch.long)
    torch.testing.assert_close(module(x, chosen, torch.ones(5, 1)), expected, rtol=1e-4, atol=1e-4)


def test_groupings(tmp_path):
    def groups(**plan):
        return make_backend(tmp_path, **plan).plan.groups

    layers = moe_layers(tiny_moe("qwen2_moe"))
    experts = sum(layer.num_experts for layer in layers)
    by_expert = [g for g in groups() if g.members[0].role == "experts"]
    assert len(by_expert) == experts
    assert all(len(group.members) == 3 for group in by_expert)
    assert by_expert[1].name == "model.layers.0.mlp.experts.1"
    by_projection = [g for g in groups(experts="projection") if g.members[0].role == "experts"]
    assert [g.name.rpartition("experts.")[2] for g in by_projection[:2]] == [
        "0.gate_proj+up_proj",
        "0.down_proj",
    ]
    assert len(by_projection) == 2 * experts
    by_layer = [g for g in groups(serve="vllm") if g.members[0].role == "experts"]
    assert [g.name for g in by_layer] == [f"{layer.name}.experts" for layer in layers]
    by_both = [g for g in groups(experts="layer-projection") if g.members[0].role == "experts"]
    assert [g.name.rpartition(".")[2] for g in by_both[:3]] == ["gate_proj", "up_proj", "down_proj"]
    assert len(by_both) == 3 * len(layers)
    names = {info.name for group in groups() for info in group.members}
    assert not any(name.endswith(("mlp.gate", "shared_expert_gate")) for name in names)  # never routers
    with pytest.raises(ValueError, match="loads experts grouped by layer or model, not by projection"):
        groups(serve="vllm", experts="projection")
    with pytest.raises(ValueError, match="each needs its own width"):
        groups(experts="layer", allow_prune=True)
    with pytest.raises(ValueError, match="does not support zero points in experts"):
        groups(serve="vllm", symmetric=False)


@pytest.mark.parametrize("flags", [{"locks": ["experts=16"]}, {"skips": ["experts"]}])
def test_rules_for_packed_experts_bind_only_experts_that_are_packed(tmp_path, flags):
    """tiny qwen3_moe has rows of two lengths in an expert: one scheme for both needs short groups."""
    rows = {info.in_features for info in make_backend(tmp_path, name="qwen3_moe").plan.experts}
    between = {"name": "qwen3_moe", "serve": "transformers", "group_size": max(rows) - 1}
    assert min(rows) < between["group_size"]
    with pytest.raises(ValueError, match="needs one scheme for a whole expert"):
        make_backend(tmp_path, **between)
    with pytest.raises(ValueError, match="does not support zero points in experts"):
        make_backend(tmp_path, **between, symmetric=False)
    plan = make_backend(tmp_path, **between, symmetric=False, **flags).plan
    assert not plan.symmetric
    assert not make_backend(tmp_path, **between, **{"symmetric": None, **flags}).plan.symmetric


def test_a_lock_at_sixteen_leaves_the_other_widths_as_they_are(tmp_path):
    plan = make_backend(tmp_path, locks=["attention=16"]).plan
    assert plan.widths == (2, 3, 4, 16)
    for group in plan.groups:
        locked = group.members[0].role == "attention"
        assert group.widths == ((16,) if locked else (2, 3, 4))
    with pytest.raises(ValueError, match="one of 2, 3, 4, 16, original; got"):
        make_backend(tmp_path, locks=["attention=5"])
    with pytest.raises(ValueError, match="no linears of that role"):
        make_backend(tmp_path, name="olmoe", locks=["shared_expert=4"])


def test_bits_over_experts_alone_and_over_everything(tmp_path):
    everything = make_backend(tmp_path)
    experts = make_backend(tmp_path, count="experts", locks=["attention=16"])
    counted = [i for i in experts.plan.linears if i.role in ("experts", "shared_expert")]
    problem = experts.problem(Budget("bits", Fraction(3)))
    assert problem.unit_budgets[0] == 3 * sum(info.parameters for info in counted)
    assert experts.budget_range("bits") == ("2", "4")
    choices = np.array(
        [k if len(g.widths) > 1 else 3 for k, g in zip([1] * 999, experts.plan.groups, strict=False)]
    )
    allocation = problem.allocation(choices)
    assert experts.average_width(allocation) == 3
    assert problem.units(allocation)[0] == problem.unit_budgets[0]
    total = sum(info.parameters for info in everything.plan.linears)
    assert everything.problem(Budget("bits", Fraction("2.5"))).unit_budgets[0] == int(2.5 * total)
    with pytest.raises(ValueError, match="would cost nothing"):
        make_backend(tmp_path, count="experts").problem(Budget("bits", Fraction(3)))
    with pytest.raises(InfeasibleBudgetError, match="`bits` must lie between 2 and 4"):
        experts.problem(Budget("bits", Fraction(5)))


def test_active_bits_weigh_groups_by_their_visits(tmp_path):
    backend = make_backend(tmp_path)
    data = text()
    backend.count_visits(data)
    visits = backend.visits
    assert visits.tokens == int(data.mask.sum())
    for layer in moe_layers(backend.loaded.model):
        assert sum(visits.experts[layer.index]) == visits.tokens * layer.top_k
    counted = Costs(backend.loaded.model, backend.plan, "active_bits", visits=visits)
    for row, group in zip(counted.matrix, backend.plan.groups, strict=True):
        member = group.members[0]
        times = visits.tokens
        if isinstance(member, ExpertLinear):
            times = max(visits.experts[member.layer.index][member.expert], 1)
        assert row.tolist() == [w * times * group.parameters for w in backend.plan.widths]
    assert backend.budget_range("active_bits") == ("2", "4")
    unvisited = Visits(10, {0: [0] * 8})
    assert unvisited.of(backend.plan.experts[0]) == 1


def routed(layer, hidden):
    flat = hidden.reshape(-1, hidden.shape[-1])
    return flat, route(layer.rule, layer.logits(flat), layer.correction)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hessians_are_those_of_the_routed_tokens(name):
    """Against a loop over experts; without topping up, then with it."""
    model = tiny_moe(name, dtype=torch.float32)
    layer = moe_layers(model)[0]
    hidden = torch.randn(40, 32)
    routing = route(layer.rule, layer.logits(hidden), layer.correction)
    enough = int(routing.indices.flatten().bincount(minlength=layer.num_experts).min()) + 1
    plain, topped = ExpertHessians(layer, 40, 0), ExpertHessians(layer, 40, enough)
    for part in hidden.split(20):
        plain.add(*routed(layer, part))
        topped.add(*routed(layer, part))
    experts = {(info.expert, info.projection): info.weight for info in expert_linears(layer)}
    bias = getattr(layer.experts, "gate_up_proj_bias", None)
    for expert in range(layer.num_experts):
        rows = hidden[(routing.indices == expert).any(dim=1)]
        assert int(plain.visits[expert]) == int(topped.visits[expert]) == len(rows)
        assert int(plain.added[expert]) == 0
        assert int(topped.visits[expert] + topped.added[expert]) >= enough
        if len(rows):
            both = [rows @ experts[expert, part].T for part in ("gate", "up")]
            flat = (
                torch.stack(both, -1).flatten(-2) if layer.architecture.interleaved else torch.cat(both, -1)
            )
            inner = layer.experts._apply_gate(flat if bias is None else flat + bias[expert])
            torch.testing.assert_close(
                plain.matrices(False)[expert], 2 * rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(
                plain.matrices(True)[expert], 2 * inner.T @ inner / len(rows), rtol=1e-3, atol=1e-3
            )
    # Those that are added are the likeliest of the tokens that were not routed there, batch by batch.
    short = int((topped.added > 0).nonzero()[0])
    first = routing.indices[:20]
    there = (first == short).any(dim=1)
    missing = max(enough // 2 + 1 - int(there.sum()), 1)
    wanted = routing.mass[:20, short].masked_fill(there, -1.0).topk(missing).indices
    rows = torch.cat([hidden[:20][there], hidden[wanted]])
    fresh = ExpertHessians(layer, 20, int(there.sum()) + missing)
    fresh.add(*routed(layer, hidden[:20]))
    assert int(fresh.added[short]) == missing
    torch.testing.assert_close(
        fresh.matrices(False)[short], 2 * rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4
    )


def test_candidates_are_gptq_of_each_expert(tmp_path):
    backend = make_backend(tmp_path, name="qwen3_moe", method="gptq", group_size=8)
    data = text()
    backend.candidates(data)
    info = next(i for i in backend.plan.experts if i.projection == "up" and i.expert == 3)
    # What its layer sees, from hooks on the full model.
    hessians = ExpertHessians(info.layer, data.tokens.numel(), 8)
    hook = info.layer.block.register_forward_pre_hook(
        lambda _, args: hessians.add(*routed(info.layer, args[0]))
    )
    for start in (0, 2):
        backend.loaded.model(data.tokens[start : start + 2])
    hook.remove()
    expected = gptq(
        info.weight, hessians.matrices(False)[3], [IntegerGrid(3, 8, True)], storage_dtype=torch.float32
    ).candidates[0]
    found = backend.weights_of(
        backend.problem(Budget("bits", Fraction(3))).allocation(np.ones(len(backend.plan.groups), dtype=int))
    )
    assert torch.equal(found[info.name].codes(), expected.codes())
    statistics = backend.store.statistics(info.stored_in, "3")
    assert len(statistics["relative_error"]) == info.layer.num_experts
    assert statistics["tokens"] == hessians.visits.tolist()
    assert statistics["added_tokens"] == hessians.added.tolist()
    # A second backend finds them in the store.
    again = make_backend(tmp_path, name="qwen3_moe", method="gptq", group_size=8)
    again.candidates(data)
    assert again.store.complete


@pytest.mark.parametrize(
    "plan", [{}, {"experts": "projection"}, {"locks": ["attention=16", "experts.1.=16"]}]
)
def test_the_switched_model_is_the_checkpoint(plan, tmp_path, monkeypatch):
    """Logits under gates, of the packed checkpoint and of the dense one agree, and the bytes are as certified."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    pytest.importorskip("compressed_tensors")
    backend = make_backend(tmp_path, dtype=torch.float32, **plan)
    data = text()
    backend.candidates(data)
    rng = np.random.default_rng(0)
    size = backend.costs("size")
    choices = np.array([backend.plan.widths.index(int(rng.choice(g.widths))) for g in backend.plan.groups])
    bits = backend.costs("bits")
    exactly = Fraction(int(bits.matrix[np.arange(len(choices)), choices].sum()), bits.parameters)
    problem = backend.problem(Budget("bits", exactly))
    allocation = problem.allocation(choices)
    assert problem.units(allocation)[0] == problem.unit_budgets[0]
    with backend.apply(allocation) as applied:
        expected = applied.model(data.tokens).logits
    source, weights = backend.deployed(allocation)
    packed = CompressedTensorsExporter().export(ExportRequest(source, weights, tmp_path / "packed"))
    DenseExporter().export(ExportRequest(source, weights, tmp_path / "dense"))
    for folder in ("packed", "dense"):
        model = load_model(tmp_path / folder).model if folder == "packed" else _stock(tmp_path / folder)
        torch.testing.assert_close(model(data.tokens).logits, expected, rtol=1e-4, atol=1e-4)
    remote = _stock(tmp_path / "packed", trust_remote_code=True)
    torch.testing.assert_close(remote(data.tokens).logits, expected, rtol=1e-4, atol=1e-4)
    bound = size.fixed + int(size.matrix[np.arange(len(choices)), choices].sum())
    assert packed.total_bytes == checkpoint_size(tmp_path / "packed")["bytes"] <= bound
    assert bound - packed.total_bytes < 24 * (len(packed.tensors) + 8)
    measured = average_bits(tmp_path / "packed", [info.name for info in backend.plan.linears])
    widths = {name: option.bits for name, option in backend.choice_of(allocation).items()}
    itemsize = 8 * source.dtype.itemsize
    assert measured["weight_bits"] == sum(
        (itemsize if widths[i.name] == 16 else widths[i.name]) * i.parameters for i in backend.plan.linears
    )
    # One way of counting: the budget, the width that is reported, and the file.
    stored = Fraction(measured["weight_bits"], measured["parameters"])
    assert backend.average_width(allocation) == exactly == stored


def _stock(folder, **arguments):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()


def test_pruned_and_quantized_in_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    pytest.importorskip("compressed_tensors")
    backend = make_backend(tmp_path, name="qwen3_moe", allow_prune=True)
    assert backend.plan.widths == (0, 2, 3, 4)
    data = text()
    backend.candidates(data)
    problem = backend.problem(Budget("size", Fraction(60_000)))
    choices = np.array([1 + i % 3 for i in range(problem.num_groups)])
    experts = [i for i, group in enumerate(backend.plan.groups) if 0 in group.widths]
    choices[[experts[1], experts[4], experts[-1]]] = 0
    allocation = problem.allocation(choices)
    with backend.apply(allocation) as applied:
        expected = applied.model(data.tokens).logits
    source, weights = backend.deployed(allocation)
    summary = CompressedTensorsExporter().export(ExportRequest(source, weights, tmp_path / "out"))
    model = load_model(tmp_path / "out").model
    torch.testing.assert_close(model(data.tokens).logits, expected, rtol=1e-4, atol=1e-4)
    remote = _stock(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(remote(data.tokens).logits, expected, rtol=1e-4, atol=1e-4)
    size = backend.costs("size")
    assert summary.total_bytes <= size.fixed + int(size.matrix[np.arange(len(choices)), choices].sum())
    names = backend.written_names(allocation)
    assert average_bits(tmp_path / "out", list(names))["parameters"] == sum(
        i.parameters for i in names.values()
    )
    # Taking an expert out has a predicted cost, from the same pass as the widths.
    differences = backend.differences(data)
    assert float(differences[:, experts, 0].abs().max()) > 0


def test_errors_of_weights_are_those_of_every_expert(tmp_path):
    """What HIGGS reads, against the weights themselves; a pruned expert loses all of it."""
    backend = make_backend(tmp_path, name="qwen3_moe", allow_prune=True)
    backend.candidates(text())
    table, problem = backend.option_errors(), backend.problem(Budget("bits", Fraction(2)))
    weights = backend.weights_of(
        problem.allocation(np.full(problem.num_groups, backend.plan.widths.index(2)))
    )
    for row, group in enumerate(backend.plan.groups):
        full = sum(float(m.weight.double().square().sum()) for m in group.members)
        lost = sum(
            float((weights[m.name].dequantize() - m.weight).double().square().sum()) for m in group.members
        )
        assert float(table[row, backend.plan.widths.index(2)]) == pytest.approx(lost / full, rel=1e-5)
        assert float(table[row, backend.plan.widths.index(0)]) == 1.0


def test_routers_never_lose_too_many_experts(tmp_path):
    """However much a search likes to remove experts, the cheapest budget included."""
    backend = make_backend(tmp_path, name="qwen3_moe", allow_prune=True)
    layers = [getattr(group.members[0], "layer", None) for group in backend.plan.groups]
    low = Fraction(backend.budget_range("bpw")[0])
    for budget in (low, low + Fraction(1, 2), low + 2):
        problem = backend.problem(Budget("bpw", budget))
        values = np.random.default_rng(0).normal(size=(problem.num_groups, problem.num_options))
        values[:, 0] += 100.0
        choices = np.asarray(rco.solve_mckp(values, problem).allocation)
        for layer in moe_layers(backend.loaded.model):
            own = [each is not None and each.index == layer.index for each in layers]
            assert (choices[own] != 0).sum() >= layer.top_k
        assert problem.is_feasible(choices)
    with pytest.raises(rco.InfeasibleBudgetError, match="must lie between"):
        backend.problem(Budget("bpw", low * Fraction(99, 100)))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2", "qwen2_moe"])
def test_layer_errors_are_those_of_one_projection_at_a_time(name, tmp_path):
    """Against the block's own output with that matrix replaced in the model."""
    backend = make_backend(tmp_path, name=name, experts="projection", locks=LOCKS[name])
    data = text(sequences=2)
    backend.candidates(data)
    table = backend.layer_errors(data)
    layer = moe_layers(backend.loaded.model)[-1]
    inputs = []
    hook = layer.block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    backend.loaded.model(data.tokens)
    hook.remove()
    (hidden,) = inputs

    def output():
        result = layer.block(hidden)
        result = result[0] if isinstance(result, tuple) else result
        return result.reshape(-1, hidden.shape[-1])[data.mask.reshape(-1)]

    expected, packed = output(), backend.packed()
    groups = backend.plan.groups
    rows = [i for i, g in enumerate(groups) if getattr(g.members[0], "layer", None) is not None]
    rows = [i for i in rows if groups[i].members[0].layer.index == layer.index]
    shared = [
        i
        for i, g in enumerate(groups)
        if g.members[0].role == "shared_expert" and g.block == layer.decoder_index
    ]
    assert len(shared) == (3 if layer.shared is not None else 0)
    for row in (*rows[:4], *shared):
        norms = []
        for member in groups[row].members:
            before = member.weight.clone()
            found = packed[member.name]["2"] if row in shared else packed_candidate(packed, member, "2")
            member.weight.data.copy_(found.dequantize())
            norms.append(float((output() - expected).norm()))
            member.weight.data.copy_(before)
        assert float(table[row, backend.plan.widths.index(2)]) == pytest.approx(
            sum(norms), rel=1e-3, abs=1e-5
        )
    other = make_backend(tmp_path / "other", name=name)
    other.candidates(data)
    with pytest.raises(ValueError, match=r"other groups.*`lock='attention=16'`"):
        other.layer_errors(data)


LOCKS = {
    "qwen3_moe": ["attention=16", "mlp=16"],
    "gpt_oss": ["attention=16"],
    "deepseek_v2": ["attention=16", "mlp=16"],
    "qwen2_moe": ["attention=16"],
}


@pytest.mark.parametrize(
    ("serve", "widths"),
    [("any", (2, 3, 8)), ("transformers", (2, 5)), ("vllm", (2, 4, 8)), ("vllm-marlin", (4, 8))],
)
def test_bytes_hold_for_every_preset_and_engines_take_the_config(serve, widths, tmp_path):
    backend = make_backend(tmp_path, serve=serve, widths=widths, symmetric=None)
    backend.candidates(text())
    size = backend.costs("size")
    allowed = [[backend.plan.widths.index(w) for w in group.widths] for group in backend.plan.groups]
    ends = [
        sum(pick(row[k] for k in ok) for row, ok in zip(size.matrix, allowed, strict=True))
        for pick in (min, max)
    ]
    rng = np.random.default_rng(0)
    for share in (0.2, 0.7):
        budget = int(size.fixed + ends[0] + share * (ends[1] - ends[0]))
        problem = backend.problem(Budget("size", Fraction(budget)))
        solution = rco.solve_mckp(rng.random((problem.num_groups, problem.num_options)), problem)
        source, weights = backend.deployed(problem.allocation(solution.allocation))
        folder = tmp_path / f"out-{share}"
        # The exporter itself refuses what the engine would not load.
        CompressedTensorsExporter().export(ExportRequest(source, weights, folder, engine=serve))
        assert checkpoint_size(folder)["bytes"] <= budget
    if serve.startswith("vllm"):
        schemes = {name: packed.format for name, packed in weights.items()}
        first = next(i for i in backend.plan.experts if i.name in schemes)
        bits = next(w for w in widths if w != schemes[first.name].bits)
        schemes[first.name] = IntegerGrid(bits, None, True)
        config = {"model_type": "qwen2_moe", "quantization_config": quantization_config(source, schemes)}
        assert any("experts" in line for line in validate_for_engine(config, serve))


def test_steadied_losses_pool_over_the_experts_of_a_layer():
    """With losses that are a factor times the squared error, times noise: the noise halves, at least."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.rand(64, 3, generator=generator, dtype=torch.float64) + 0.1
    factor = torch.tensor([[2.0, 1.5, 1.0]] * 32 + [[0.2, 0.1, 0.4]] * 32, dtype=torch.float64)
    noise = (0.3 * torch.randn(64, 3, generator=generator, dtype=torch.float64)).exp()
    alike = [(0, 0)] * 32 + [(1, 0)] * 32
    found = steadied_losses(factor * squares * noise, squares.sqrt(), alike)
    error, before = (found / (factor * squares)).log(), noise.log()
    assert float(error.std()) < 0.6 * float(before.std())
    # Groups that are like no other, and options without an error, stay as they are.
    losses = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    errors = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    kept = steadied_losses(losses, errors, [None, (0,), (0,), None])
    assert torch.equal(kept[[0, 3]], losses[[0, 3]])
    assert torch.equal(kept[:, 1], losses[:, 1])
    assert float(kept[1, 0]) == pytest.approx(float(0.75 * losses[1, 0] + 0.25 * losses[2, 0]))
