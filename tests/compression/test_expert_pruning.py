"""Expert pruning: exact counts, the deployed forward, restored models, clear errors."""

import numpy as np
import pytest
import torch

import rco
from rco.baselines.picks import TopGlobal, TopPerBlock
from rco.compression.assignment import experts_to_prune
from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.costs import ExpertShares
from rco.compression.plan import make_removal_plan
from rco.compression.priors import logits_from_scores, score_table
from rco.core.search import RCO
from rco.data.calibration import CalibrationSet
from rco.export.pruned_experts import export_pruned
from rco.models.loading import wrap_model
from rco.models.moe.gates import expert_gates
from rco.models.moe.layers import UnsupportedMoEError
from rco.models.moe.linears import model_linears
from rco.pipeline.configs import PruneConfig
from rco.pipeline.planning import plan_groups
from rco.testing import check_objective
from rco.testing.tiny_models import tiny_moe

KEEP = 1


def pruning(loaded, locks=(), **settings):
    plan = make_removal_plan(model_linears(loaded.layout, loaded.model), locks)
    return Compression(loaded, plan, **settings)


def tokens(count=4, length=12, seed=0):
    ids = torch.randint(97, (count, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, -1] = False
    return CalibrationSet(ids, mask, ("a",) * count, "test", seed, "calibration")


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(tiny_moe("qwen3_moe"))  # layers 0 and 2 sparse, 8 experts each, top 3


def experts(text):
    return Budget.parse(experts=text)


# ----------------------------------------------------------------------------- counts


def test_exact_counts_over_random_budgets_floors_and_locks(loaded):
    """Whatever the values, exactly the asked number is pruned, within floors and locks."""
    rng = np.random.default_rng(0)
    names = [group.name for group in pruning(loaded).plan.groups]
    blocks = np.repeat([0, 1], 8)
    tried = 0
    while tried < 100:
        least = int(rng.integers(0, 7))
        locks = [f"{name}$={rng.choice(['keep', 'prune'])}" for name in rng.choice(names, rng.integers(0, 5))]
        uniform = bool(rng.integers(2))
        count = int(rng.integers(1, 11))
        backend = pruning(loaded, locks, min_per_layer=least, uniform=uniform)
        allowed = np.array([[width in group.widths for width in (0, 16)] for group in backend.plan.groups])
        floor = max(3, least)
        try:
            problem = backend.problem(experts(str(count)))
        except ValueError:
            # Refused only where counting says that no choice exists.
            per_layer = [
                (
                    max(floor, int((~allowed[blocks == b, 0]).sum())),
                    int(allowed[blocks == b, 1].sum()),
                )
                for b in (0, 1)
            ]
            low, high = sum(least for least, _ in per_layer), sum(most for _, most in per_layer)
            possible = low <= 16 - count <= high and all(a <= b for a, b in per_layer)
            if uniform:
                stays = 8 - count / 2
                possible = count % 2 == 0 and all(a <= stays <= b for a, b in per_layer)
            assert not possible, (count, locks, least, uniform)
            continue
        tried += 1
        values = torch.from_numpy(rng.normal(size=(16, 2)))

        class Loss:
            num_batches = 1

            def loss(self, gates, batch, values=values):
                return (gates * values).sum() + (gates[:, KEEP].sum() - 5) ** 2

        searcher = RCO(steps=1, samples=1, refine=3, seed=tried)
        found = np.asarray(searcher.search(problem, Loss()).allocation)
        assert (found != KEEP).sum() == count
        assert allowed[np.arange(16), found].all()
        kept = np.bincount(blocks[found == KEEP], minlength=2)
        assert (kept >= floor).all()
        assert not uniform or kept[0] == kept[1]


@pytest.mark.parametrize(
    ("asked", "experts_in_all", "pruned"), [("0.25", 192, 48), ("0.3", 16, 4), ("7", 16, 7), ("1/3", 16, 5)]
)
def test_a_fraction_is_rounded_down(asked, experts_in_all, pruned):
    assert experts_to_prune(experts(asked), experts_in_all) == pruned


@pytest.mark.parametrize(
    ("settings", "asked", "words"),
    [
        ({}, "1.5", "fraction between 0 and 1 or a whole number"),
        ({}, "0.01", "less than one expert"),
        ({}, "11", "prune at most 10"),
        ({}, "0.9", "prune at most 10"),
        ({"uniform": True}, "5", "ask for 4 or 6"),
        ({"uniform": True}, "12", "must keep at least 3"),
        ({"min_per_layer": 9}, "2", "more than the 8 experts"),
        ({"locks": ["nothing=keep"]}, "2", "matches no expert"),
        ({"locks": ["layers=drop"]}, "2", "VALUE is one of keep, prune"),
        ({"locks": ["(=keep"]}, "2", "not a regular expression"),
        ({"locks": [r"layers\.0\.=prune"]}, "2", "leave 0 experts"),
        ({"locks": ["layers=keep"]}, "2", "cannot be met"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(loaded, settings, asked, words):
    with pytest.raises(ValueError, match=words):
        pruning(loaded, **settings).problem(experts(asked))


def test_a_dense_model_is_refused():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with pytest.raises(UnsupportedMoEError, match="llama"):
        plan_groups(PruneConfig(model="any"), wrap_model(transformers.LlamaForCausalLM(config)))


def test_a_mask_of_another_model_is_refused(loaded):
    backend = pruning(loaded)
    with pytest.raises(ValueError, match="another model"):
        backend.keep_of([KEEP] * 15)
    with pytest.raises(ValueError, match="another model"):
        backend.set_scores({"reap": [[1.0] * 8]})


# ------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("kind", ["parameters", "size"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_budgets_of_parameters_and_bytes_bound_what_is_written(name, kind, tmp_path):
    model = tiny_moe(name)
    backend = pruning(wrap_model(model))
    weights = ExpertShares.of(model, backend.layers, kind)
    full = weights.fixed + sum(w * c for w, c in zip(weights.per_expert, backend.expert_counts, strict=True))
    if kind == "parameters":
        assert full == sum(p.numel() for p in model.parameters()) + sum(
            layer.correction.numel() for layer in backend.layers if layer.correction is not None
        )
    limit = full - sum(weights.per_expert) - 1
    problem = backend.problem(Budget.parse(**{kind: limit}))
    solution = rco.solve_mckp(np.random.default_rng(0).random((len(backend.plan.groups), 2)), problem)
    chosen = np.asarray(solution.allocation)
    chosen = rco.core.moves.spend(problem, chosen, np.zeros((len(chosen), 2)))
    # Nothing more would have fitted, and what was written obeys.
    assert weights.fixed + problem.units(chosen)[0] <= limit
    assert weights.fixed + problem.units(chosen)[0] + min(weights.per_expert) > limit
    export_pruned(model, backend.keep_of(chosen), tmp_path / "out")
    if kind == "size":
        written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
        assert written <= limit
    with pytest.raises(ValueError, match="enough for the full model"):
        backend.problem(Budget.parse(**{kind: full}))
    with pytest.raises(rco.InfeasibleBudgetError, match="is too small"):
        backend.problem(Budget.parse(**{kind: weights.fixed}))


# --------------------------------------------------------------------------- objective


@pytest.mark.parametrize("mode", ["deployed", "scale"])
def test_objective_contract_and_restoration(mode):
    model = tiny_moe("qwen2_moe")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(tokens().tokens).logits
    backend = pruning(wrap_model(model), gates=mode)
    with backend.objective(tokens(), tokens(2, seed=1)) as objective:
        kept = torch.tensor([[0.0, 1.0]]).repeat(len(backend.plan.groups), 1).double()
        assert float(objective.loss(kept, 0)) == pytest.approx(0.0, abs=1e-6)
        if mode == "scale":
            check_objective(objective, len(backend.plan.groups), 2)
        mask = kept.clone()
        mask[:2] = torch.tensor([1.0, 0.0]).double()
        gates = mask.requires_grad_()
        (gradient,) = torch.autograd.grad(objective.loss(gates, 0), gates)
        assert gradient[:, 1 - KEEP].abs().sum() > 0
        assert torch.equal(gradient[:, KEEP], torch.zeros_like(gradient[:, KEEP]))
        # The acceptance is one at the full model, and lower elsewhere.
        assert float(objective.acceptance(kept, 0)) == pytest.approx(1.0, abs=1e-5)
        assert float(objective.acceptance(mask.detach(), 0)) < 1.0
        # The selection split sees the deployed model in either mode.
        chosen = torch.cat([torch.zeros(2), torch.ones(len(backend.plan.groups) - 2)])
        selection = float(objective.selection.loss(mask.detach(), 0))
    with expert_gates(model) as deployed, torch.no_grad():
        deployed.set_gates(chosen)
        ids = tokens(2, seed=1).tokens[:1]
        pruned = torch.log_softmax(model(ids).logits[:, :-1].double(), -1)
        deployed.clear()
        full = torch.log_softmax(model(ids).logits[:, :-1].double(), -1)
    assert selection == pytest.approx(float((full.exp() * (full - pruned)).sum(-1).mean()), rel=1e-3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(model(tokens().tokens).logits, expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_masked_tokens_do_not_count_in_scores(loaded):
    data = tokens()
    mask = data.mask.clone()
    mask[2:] = False
    part = CalibrationSet(data.tokens, mask, data.domains, "test", 0, "calibration")
    backend, alone = pruning(loaded), pruning(loaded)
    backend.score_experts(part)
    alone.score_experts(data.select([0, 1]))
    for name in ("reap", "frequency", "mass"):
        for mine, theirs in zip(backend.scores[name], alone.scores[name], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_logits_order_by_relative_score():
    scores = [torch.tensor([1.0, 3.0]), torch.tensor([100.0, 300.0, 200.0, 0.0])]
    logits = logits_from_scores(scores, 1.0)
    relative = torch.tensor([0.5, 1.5, 100 / 150, 2.0, 200 / 150, 0.0])
    assert torch.equal(logits.argsort(), relative.argsort())
    assert float(logits.min()) == -4.0


def test_scores_as_methods_prune_the_lowest(loaded):
    backend = pruning(loaded)
    backend.score_experts(tokens())
    problem = backend.problem(experts("4"))
    scores = backend.scores["reap"]
    with backend.objective(tokens(), tokens(2, seed=1)) as objective:
        per_layer = TopPerBlock().search(problem, objective, prior=score_table(scores))
        over_all = TopGlobal().search(problem, objective, prior=score_table(scores))
    if per_layer.chosen_from == "pick":
        kept = backend.kept(per_layer.allocation)
        assert [len(layer) for layer in kept] == [6, 6]
        for layer, values in zip(kept, scores, strict=True):
            assert set(layer) == set(values.topk(6).indices.tolist())
    flat = torch.cat(scores)
    kept = backend.keep_of(over_all.allocation)
    assert int(kept.sum()) == 12
    if over_all.chosen_from == "pick":
        gone = [part for part in torch.split(kept, [8, 8])]
        if min(int(part.sum()) for part in gone) > 3:  # no floor in the way
            assert set(kept.nonzero().squeeze(-1).tolist()) == set(flat.topk(12).indices.tolist())


def test_search_beats_every_plain_choice_on_its_selection_split(loaded):
    backend = pruning(loaded)
    backend.score_experts(tokens(8), sensitivity=8)
    problem = backend.problem(experts("5"))
    with backend.objective(tokens(8), tokens(4, seed=1)) as objective:
        result = RCO(steps=12, samples=4, lr=0.3, refine=10).search(
            problem, objective, **backend.search_inputs(problem, "fisher", 1.0)
        )
        rules = [
            cls().search(problem, objective, prior=score_table(backend.scores[score])).loss
            for cls in (TopGlobal, TopPerBlock)
            for score in ("reap", "frequency", "mass")
        ]
    assert int(backend.keep_of(result.allocation).sum()) == 11
    assert result.loss <= min(rules)
