"""Causal architectures of transformers: what was tested with a tiny model of each, and why others were not.

The test makes candidates, a gradient, a mixed allocation and a checkpoint, and compares the logits of stock
transformers in another process with those of the search.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TESTED", "TESTED_WITH", "UNTESTED", "Tested", "describe_architectures"]

TESTED_WITH = "5.22.2"
"""Version of transformers."""


@dataclass(frozen=True)
class Tested:
    """Result of an architecture's test.

    Attributes:
        packed_experts: Experts were packed, too.
        unread_experts: Some stacks of experts could not be verified, and stayed as they were.
        stacked_experts: Experts stayed as they were, because checkpoints keep them in one tensor, which
            transformers cannot unpack; ``serve="any"`` packs them and adds the code that unpacks them.
        dense: The checkpoint held decoded weights: compressed-tensors cannot pack the linears, or transformers
            reads their weights before a packed checkpoint is loaded.
        exact: Logits agreed bit for bit; otherwise to rounding.
    """

    packed_experts: bool = False
    unread_experts: bool = False
    stacked_experts: bool = False
    dense: bool = False
    exact: bool = True

    @property
    def summary(self) -> str:
        """The result in one line."""
        parts = ["dense checkpoint" if self.dense else "packed checkpoint"]
        if self.packed_experts:
            parts.append("packed experts")
        if self.unread_experts or self.stacked_experts:
            parts.append("experts at their original width")
        return f"{', '.join(parts)}: logits equal {'bit for bit' if self.exact else 'to rounding'}"


_DENSE_LINEARS = """
    apertus arcee bamba bart beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot
    blenderbot-small bloom camembert codegen cohere cohere2 cohere_compass_text cpmant ctrl cwm
    data2vec-text diffllama doge electra emu3 ernie ernie4_5 exaone4 falcon_h1 falcon_mamba fuyu gemma
    gemma2 gemma3 gemma3_text gemma3n_text gemma4_text gemma4_unified_text git glm glm4 got_ocr2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gptj granite granite_swa helium hrm_text hunyuan_v1_dense hyperclovax
    jais2 lfm2 llama mamba mamba2 marian mbart megatron-bert minicpm3 ministral ministral3 mistral mllama
    moshi moss_transcribe_diarize mpt mvp nanochat nemotron olmo olmo2 olmo3 olmo_hybrid opt pegasus
    persimmon phi phi3 phi4_multimodal plbart qwen2 qwen3 qwen3_5_text rembert roberta roberta-prelayernorm
    roformer seed_oss smollm3 stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta
    xlm-roberta-xl
"""
_PACKED_EXPERTS = """
    afmoe axk1 axk2 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
    ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa hunyuan_v1_moe hy_v3
    jamba kimi_linear kolibri1 laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 mixtral nemotron_h olmoe
    phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text solar_open
"""
_STACKED_EXPERTS = """
    aria_text gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hy_v4 inkling_text
    minimax_m3_vl_text zaya
"""
_UNREAD_EXPERTS = """
    dbrx inkling_text jetmoe llama4_text longcat_flash
"""
_DENSE_CHECKPOINTS = """
    falcon gpt-sw3 gpt2 llama4_text modernbert-decoder openai-gpt recurrent_gemma rwkv xlstm
"""
_ROUNDED = """
    gpt-sw3 gpt2 openai-gpt
"""


def _tested() -> dict[str, Tested]:
    lists = (_PACKED_EXPERTS, _UNREAD_EXPERTS, _STACKED_EXPERTS, _DENSE_CHECKPOINTS, _ROUNDED)
    packed, unread, stacked, dense, rounded = (set(names.split()) for names in lists)
    every = {*_DENSE_LINEARS.split(), *packed, *unread, *stacked, *dense}
    return {
        name: Tested(name in packed, name in unread, name in stacked, name in dense, name not in rounded)
        for name in sorted(every)
    }


TESTED: dict[str, Tested] = _tested()

_PART = "its language part is tested as {}"
_DRAFTS = "it drafts for another model, whose states it needs"
_SHARES = "several of its layers share one attention block, whose weight would be given a width for each"
UNTESTED: dict[str, str] = {
    "blt": "no tiny configuration was made",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "reformer": "its layers are reversible and pass pairs of states, so its layout fails the check",
    "roc_bert": "it changes the output of a linear in place, which a switchable linear does not allow",
    "zamba": _SHARES,
    "zamba2": _SHARES,
    **{
        name: _PART.format(f"{name}_text")
        for name in ("gemma3n", "gemma4", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
    },
    "musicgen": "it predicts several codebooks instead of one vocabulary",
    "musicgen_melody": "it predicts several codebooks instead of one vocabulary",
    "prophetnet": "it predicts several tokens at once, so its layout fails the check",
    "xlnet": "it attends in both directions, and its checkpoint does not load packed",
    "xmod": "it needs a language to be set first",
    "youtu": f"transformers {TESTED_WITH} does not load its own checkpoint to the same logits",
}  # fmt: skip


def describe_architectures() -> dict[str, str]:
    """One line for each architecture: what was tested, or the reason why nothing was."""
    tested = {name: entry.summary for name, entry in TESTED.items()}
    untested = {name: f"not tested: {reason}" for name, reason in UNTESTED.items()}
    return dict(sorted({**tested, **untested}.items()))
