"""Appendix C: OLMoE-1B-7B with 5 to 50 per cent of its experts pruned, RCO at 300 steps, eight benchmarks.

The paper states FineWeb-Edu, the steps and REAP scores as initial logits. The checkpoint and the rest of the
settings are those of its published code (recipe.py); the paper does not name the checkpoint.
"""

import sys

from recipe import GENERAL, PRUNING_DATA, PRUNING_RCO, Job, Recipe, run

SHARES = ("0.05", "0.1", "0.15", "0.2", "0.25", "0.5")
COMMON = f"{PRUNING_RCO} --steps 300 --data fineweb-edu {PRUNING_DATA} --checkpointing --device {{device}} --resume"
RECIPE = Recipe(
    table="OLMoE-1B-7B: sparsity sweep (appendix C)",
    model="allenai/OLMoE-1B-7B-0125-Instruct",
    architecture="olmoe",
    jobs=(
        *(
            Job(f"{share} pruned", f"prune {{model}} --experts {share} {COMMON} --out {{out}}/{share}")
            for share in SHARES
        ),
        Job(
            "benchmarks",
            f"evaluate {' '.join(f'{{out}}/{share}' for share in SHARES)} --reference {{model}} "
            f"--data fineweb-edu --length 2048 --tasks {GENERAL} --device {{device}}",
        ),
    ),
    tiny={"num_experts": 16},
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
