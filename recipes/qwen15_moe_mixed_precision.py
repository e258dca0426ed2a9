"""Table 3, section 4.4 and its appendix: Qwen1.5-MoE-A2.7B at 2.5, 3.0 and 3.5 bits, RCO beside MxMoE and uniform.

Settings from the paper: GPTQ at 2 to 8 bits, group size 128, asymmetric; MxMoE's sensitivities on 64 sequences.
RCO decides once per expert, MxMoE once for gate and up and once for down. RCO* and MxMoE leave attention at 16
bits; RCO spreads the same memory over all. Wikitext-2 is measured there on 100 chunks of 4096 tokens; its test
part holds fewer, so 64 are used here. From the published code (recipe.py): RCO's initial logits. Not stated
anywhere: samples and steps of RCO for this model; they are the largest of its other quantization table.
"""

import sys
from fractions import Fraction

from recipe import CANDIDATES, QUANTIZATION_RCO, Job, Recipe, run

TASKS = "piqa,hellaswag,arc_easy,arc_challenge,winogrande,lambada_openai"
# One store of candidates for all rows.
COMMON = (
    f"--store {{out}}/candidates {CANDIDATES} --data fineweb-edu --sequences 256 --sensitivity 64 --length 2048 "
    "--evaluation 64 --format dense --checkpointing --device {device} --resume"
)
EXPERTS = "--count experts --lock attention=16"
RCO = f"{QUANTIZATION_RCO} --steps 200 --samples 16"

# Weights of the 24 layers: attention, and 60 routed experts with the shared one.
IN_ATTENTION = 24 * 4 * 2048**2
IN_EXPERTS = 24 * 3 * 2048 * (60 * 1408 + 5632)


def with_attention(bits: str) -> str:
    """The average width of everything at the memory of experts at ``bits`` and attention at 16 bits."""
    total = Fraction(bits) * IN_EXPERTS + 16 * IN_ATTENTION
    millionths = int(total / (IN_EXPERTS + IN_ATTENTION) * 10**6)  # rounded down: never more memory
    return f"{millionths // 10**6}.{millionths % 10**6:06}"


ROWS = {f"uniform-{bits}": f"--bits {bits} {EXPERTS} --searcher uniform" for bits in ("3.0", "4.0")}
for budget in ("2.5", "3.0", "3.5"):
    ROWS[f"mxmoe-{budget}"] = f"--bits {budget} {EXPERTS} --per-projection --searcher mxmoe"
    ROWS[f"rco-star-{budget}"] = f"--bits {budget} {EXPERTS} {RCO}"
    ROWS[f"rco-{budget}"] = f"--bits {with_attention(budget)} {RCO}"
RUNS = " ".join(f"{{out}}/{name}" for name in ROWS)
EVALUATIONS = {
    "wikitext2": "--sequences 64 --length 4096",
    "c4": "--sequences 64 --length 2048",
    "fineweb-edu": f"--sequences 64 --length 2048 --tasks {TASKS}",
}
TINY = {
    "hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "mlp_only_layers": [],
}  # fmt: skip
RECIPE = Recipe(
    table="Qwen1.5-MoE-A2.7B mixed-precision quantization (section 4.4 and its appendix)",
    model="Qwen/Qwen1.5-MoE-A2.7B",
    architecture="qwen2_moe",
    jobs=(
        *(
            Job(name, f"quantize {{model}} {settings} {COMMON} --out {{out}}/{name}")
            for name, settings in ROWS.items()
        ),
        *(
            Job(
                f"evaluation on {data}",
                f"evaluate {RUNS} --reference {{model}} --data {data} {size} --device {{device}}",
            )
            for data, size in EVALUATIONS.items()
        ),
    ),
    tiny=TINY,
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
