"""Made-up runs that look like real ones: a small dense model at mixed widths, a small mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rco.core.problem import AllocationProblem
from rco.core.result import SearchResult, StepRecord
from rco.report.data import RunData

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
SHAPES = {
    "self_attn.q_proj": 256 * 256,
    "self_attn.k_proj": 128 * 256,
    "self_attn.v_proj": 128 * 256,
    "self_attn.o_proj": 256 * 256,
    "mlp.gate_proj": 704 * 256,
    "mlp.up_proj": 704 * 256,
    "mlp.down_proj": 704 * 256,
}


def history(steps: int, groups: int, budget: float, exchanges: int = 0) -> list[StepRecord]:
    rng = np.random.default_rng(3)
    records, best = [], math.inf
    for step in range(1, steps + 1):
        done = step / steps
        loss = 0.19 + 0.5 * math.exp(-5 * done) + 0.02 * rng.standard_normal() * (1.3 - done)
        best = min(best, loss - 0.03 * rng.random())
        records.append(
            StepRecord(
                step=step,
                steps=steps,
                loss=loss,
                best_loss=best,
                temperature=0.05**done,
                expected_cost=(budget * (1 + 1e-14 * rng.standard_normal()),),
                entropy=0.8 * (1 - done) ** 1.5 + 0.04,
                decided=round(groups * done**1.7 * 0.93),
                forwards=4 * step,
                backwards=4 * step,
                seconds=0.4 * step,
            )
        )
    for step in range(1, exchanges + 1):
        loss = 0.197 - 0.0017 * step
        records.append(StepRecord(step, 40, loss, loss, forwards=4 * steps + 3 * step, phase="refine"))
    return records


def quantized(
    *,
    name: str = "tiny-llama-bits-2.5",
    blocks: int = 8,
    bits: str = "2.5",
    tied: bool = False,
    steps: int = 60,
    exchanges: int = 7,
    head: bool = True,
    seed: int = 0,
) -> RunData:
    """A quantization run with every section of the metrics filled."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for block in range(blocks):
        paths = list(SHAPES)
        clusters = [paths[:3], paths[3:4], paths[4:6], paths[6:]] if tied else [[path] for path in paths]
        for cluster in clusters:
            members = [f"model.layers.{block}.{path}" for path in cluster]
            kinds = [path.rpartition(".")[2] for path in cluster]
            size = sum(SHAPES[path] for path in cluster)
            scale = (
                size
                * 10 ** rng.normal(-6.9, 0.45)
                * (2.5 if "v_proj" in kinds or "down_proj" in kinds else 1)
            )
            scale *= 3 if block in (0, blocks - 1) else 1
            rows.append(
                {
                    "name": members[0].rpartition(".")[0] + "." + "+".join(kinds),
                    "members": members,
                    "kind": "+".join(kinds),
                    "block": block,
                    "parameters": size,
                    "sensitivity": {str(w): scale * 4.0 ** (2 - w) for w in WIDTHS},
                    "relative_error": {str(w): 0.11 * 4.0 ** (2 - w) for w in WIDTHS},
                }
            )
    if head:
        rows.append(
            {
                "name": "lm_head",
                "members": ["lm_head"],
                "kind": "lm_head",
                "block": None,
                "parameters": 256 * 512,
            }
            | {"sensitivity": {str(w): 4.0 ** (2 - w) for w in WIDTHS}}
        )
    sizes = np.array([row["parameters"] for row in rows])
    budget = int(Fraction(bits) * int(sizes.sum()))
    problem = AllocationProblem(
        list(WIDTHS),
        budget,
        weights=sizes,
        groups=[row["name"] for row in rows],
        options=[str(width) for width in WIDTHS],
        monotone=True,
    )
    choices = _greedy(np.array([[row["sensitivity"][str(w)] for w in WIDTHS] for row in rows]), sizes, budget)
    for row, choice in zip(rows, choices, strict=True):
        row["width"] = WIDTHS[choice]
    used = problem.units(choices)[0]
    tensors = {"model.embed_tokens.weight": 512 * 256 * 2, "model.norm.weight": 512}
    for row in rows:
        for member in row["members"]:
            weights = row["parameters"] // len(row["members"])
            tensors[f"{member}.weight_packed"] = weights * row["width"] // 8
            tensors[f"{member}.weight_scale"] = weights // 64 * 2
            tensors[f"{member}.weight_zero_point"] = weights // 64 * row["width"] // 8
    headers = 24 * 1024
    total = sum(tensors.values()) + headers
    records = history(steps, len(rows), float(budget), exchanges)
    average = float(Fraction(used, int(sizes.sum())))
    return RunData(
        name=name,
        metrics={
            "kind": "quantization",
            "model": {
                "name": "tiny-llama",
                "parameters": int(sizes.sum()) + 512 * 256,
                "blocks": blocks,
                "dtype": "bfloat16",
                "fingerprint": "9c1b77e2f0",
            },
            "budget": {
                "kind": "bits",
                "requested": bits,
                "effective": f"{budget:,} bits",
                "used": f"{used:,} bits",
                "unit": "bits",
                "used_units": used,
                "budget_units": budget,
                "range": [2.0, 8.0],
                "average_bits": average,
                "average_bits_exact": str(Fraction(used, int(sizes.sum()))),
                "bits_per_weight_stored": average + 0.29,
            },
            "groups": rows,
            "evaluation": [
                _evaluated("full model", 16.0, 0.0, 0.0, 11.62),
                _evaluated("uniform 2", 2.0, 0.6134, 0.0121, 21.48),
                _evaluated("uniform 3", 3.0, 0.0937, 0.0021, 12.79),
                _evaluated("uniform interpolation", 2.5, 0.2712, 0.0058, 15.24),
                _evaluated("proxy knapsack", 2.5, 0.2131, 0.0046, 14.41),
                _evaluated("RCO", average, 0.1884, 0.0041, 14.02),
            ],
            "export": {
                "format": "compressed-tensors",
                "path": f"runs/{name}/model",
                "files": {"model.safetensors": total, "config.json": 4211, "tokenizer.json": 310_022},
                "tensors": tensors,
                "total_bytes": total,
            },
            "engine": {"preset": "vllm", "violations": []},
            "timings": {
                "candidates": 61.2,
                "sensitivities": 8.1,
                "search": 93.7,
                "evaluation": 22.5,
                "export": 1.4,
            },
        },
        config={
            "model": "tiny-llama",
            "bits": bits,
            "size": None,
            "serve": "vllm",
            "act_order": False,
            "lock": ["lm_head=8"],
            "tau": [1.0, 0.05],
            "seed": 0,
        },
        environment={
            "time": "2025-01-01T12:00:00Z",
            "rco": "0.2.0",
            "python": "3.12.1",
            "torch": "2.11.0",
            "cpu": "An example CPU @ 2.0 GHz",
            "cpu_count": 2,
            "gpu": [],
            "triton": None,
        },
        problem=problem,
        result=SearchResult(
            allocation=problem.allocation(choices),
            loss=0.1851,
            cost=problem.cost(choices),
            method="rco",
            seed=0,
            chosen_from="refined",
            candidates={
                "final": 0.19711,
                "averaged": 0.19624,
                "best sample": 0.20467,
                "prior": 0.21389,
                "uniform": 0.26954,
                "refined": 0.1851,
            },
            forwards=301,
            backwards=240,
            seconds=93.7,
            settings={"steps": steps, "samples": 4, "lr": 0.1, "tau": [1.0, 0.05], "refine": 40},
        ),
        history=records,
        header_bytes=headers,
    )


def _greedy(sensitivity: np.ndarray, sizes: np.ndarray, budget: int) -> np.ndarray:
    choices = np.zeros(len(sizes), dtype=np.int64)
    left = budget - 2 * int(sizes.sum())
    while True:
        gains = [
            ((sensitivity[i, k] - sensitivity[i, k + 1]) / sizes[i], i)
            for i, k in enumerate(choices)
            if k + 1 < len(WIDTHS) and sizes[i] <= left
        ]
        if not gains:
            return choices
        _, best = max(gains)
        choices[best] += 1
        left -= int(sizes[best])


def _evaluated(name: str, bits: float, kl: float, error: float, perplexity: float) -> dict[str, Any]:
    shares = {"en_prose": 0.9, "python": 1.25, "math": 1.1, "news": 0.75}
    return {
        "name": name,
        "bits": bits,
        "within_budget": name != "full model" and bits <= 2.5,
        "kl": kl,
        "kl_error": error,
        "perplexity": perplexity,
        "perplexity_error": 0.017 * perplexity,
        "by_domain": {
            domain: {"kl": kl * share, "perplexity": perplexity * (2 - share)}
            for domain, share in shares.items()
        },
    }


def pruned(*, layers: int = 6, experts: int = 32, share: float = 0.25, scores: bool = True) -> RunData:
    """An expert-pruning run."""
    rng = np.random.default_rng(1)
    total = layers * experts
    keep = total - round(share * total)
    saliency = rng.gamma(2.0, 1.0, (layers, experts))
    noisy = saliency * np.exp(0.35 * rng.standard_normal((layers, experts)))
    kept_flat = np.zeros(total, dtype=bool)
    kept_flat[np.argsort(-noisy.ravel())[:keep]] = True
    kept = kept_flat.reshape(layers, experts)
    problem = AllocationProblem([0, 1], keep, weights=np.ones(total, dtype=int), options=["prune", "keep"])
    allocation = problem.allocation(kept_flat.astype(np.int64))
    rows = []
    for layer in range(layers):
        row: dict[str, Any] = {
            "layer": layer,
            "experts": experts,
            "kept": np.flatnonzero(kept[layer]).tolist(),
        }
        if scores:
            frequency = rng.dirichlet(np.ones(experts))
            row["scores"] = {"reap": saliency[layer].tolist(), "frequency": frequency.tolist()}
        rows.append(row)
    domains = {"python": {"python": 0.031, "prose": 0.412}, "prose": {"python": 0.377, "prose": 0.043}}
    return RunData(
        name=f"tiny-moe-experts-{share}",
        metrics={
            "kind": "expert-pruning",
            "model": {"name": "tiny-moe", "parameters": 12_345_678, "blocks": layers, "dtype": "float32"},
            "budget": {
                "kind": "experts",
                "requested": str(share),
                "effective": f"{keep} experts",
                "used": f"{keep} experts",
                "unit": "experts",
                "used_units": keep,
                "budget_units": keep,
            },
            "evaluation": [
                {"name": "full model", "experts": total, "kl": 0.0, "perplexity": 9.4},
                {"name": "REAP uniform", "experts": keep, "kl": 0.108, "kl_error": 0.003, "perplexity": 10.7},
                {"name": "RCO", "experts": keep, "kl": 0.0712, "kl_error": 0.0021, "perplexity": 10.1},
            ],
            "moe": {"layers": rows, "overlap_with_reap": 0.83, "by_domain": domains},
            "export": {"format": "pruned-experts", "path": "runs/tiny-moe/model"},
            "timings": {"scores": 4.0, "search": 70.5},
        },
        config={"model": "tiny-moe", "experts": str(share)},
        problem=problem,
        result=SearchResult(
            allocation=allocation, loss=0.07, cost=keep, candidates={"final": 0.07, "prior": 0.09}
        ),
        history=history(50, total, float(keep)),
    )


@pytest.fixture
def make_quantized() -> Callable[..., RunData]:
    return quantized


@pytest.fixture
def make_pruned() -> Callable[..., RunData]:
    return pruned
