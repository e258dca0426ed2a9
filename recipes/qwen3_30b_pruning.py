"""Figure 1 and appendix C: Qwen3-30B-A3B with 25 and 50 per cent of its experts pruned, RCO beside EvoESAP.

The paper states FineWeb-Edu, REAP scores as initial logits, and 10 generations of EvoESAP with the KL as its
fitness. It does not state RCO's settings for this model: they are those of its published code (recipe.py), 300
steps as there. The population of EvoESAP is ours.
"""

import sys

from recipe import GENERAL, PRUNING_DATA, PRUNING_RCO, Job, Recipe, run

COMMON = f"--data fineweb-edu {PRUNING_DATA} --checkpointing --device {{device}} --resume"
METHODS = {
    "evoesap": "--searcher evoesap --generations 10 --prior reap",
    "rco": f"{PRUNING_RCO} --steps 300",
}
ROWS = {
    f"{share}-{name}": f"--experts {share} {settings}"
    for share in ("0.25", "0.5")
    for name, settings in METHODS.items()
}
RECIPE = Recipe(
    table="Qwen3-30B-A3B: per-benchmark comparison (appendix C)",
    model="Qwen/Qwen3-30B-A3B",
    architecture="qwen3_moe",
    jobs=(
        *(
            Job(name, f"prune {{model}} {settings} {COMMON} --out {{out}}/{name}")
            for name, settings in ROWS.items()
        ),
        Job(
            "benchmarks",
            f"evaluate {' '.join(f'{{out}}/{name}' for name in ROWS)} --reference {{model}} "
            f"--data fineweb-edu --length 2048 --tasks {GENERAL} --device {{device}}",
        ),
    ),
    tiny={"num_experts": 16},
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
