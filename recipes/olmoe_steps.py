"""Appendix C: OLMoE-1B-7B at 25 per cent, RCO at 50 to 500 steps beside REAP and EvoESAP, eight benchmarks.

The paper states FineWeb-Edu, the steps, REAP scores as initial logits, and 50 generations of EvoESAP with the
KL as its fitness. The checkpoint and RCO's other settings are those of its published code (recipe.py); the
population of EvoESAP is ours.
"""

import sys

from recipe import GENERAL, PRUNING_DATA, PRUNING_RCO, Job, Recipe, run

STEPS = (50, 100, 150, 200, 300, 500)
COMMON = f"--experts 0.25 --data fineweb-edu {PRUNING_DATA} --checkpointing --device {{device}} --resume"
METHODS = {
    "reap": "--searcher top-per-block --uniform --prior reap",
    "evoesap": "--searcher evoesap --generations 50 --prior reap",
    **{f"rco-{steps}": f"{PRUNING_RCO} --steps {steps}" for steps in STEPS},
}
RECIPE = Recipe(
    table="OLMoE-1B-7B: iteration sweep (appendix C)",
    model="allenai/OLMoE-1B-7B-0125-Instruct",
    architecture="olmoe",
    jobs=(
        *(
            Job(name, f"prune {{model}} {settings} {COMMON} --out {{out}}/{name}")
            for name, settings in METHODS.items()
        ),
        Job(
            "benchmarks",
            f"evaluate {' '.join(f'{{out}}/{name}' for name in METHODS)} --reference {{model}} "
            f"--data fineweb-edu --length 2048 --tasks {GENERAL} --device {{device}}",
        ),
    ),
    tiny={"num_experts": 16},
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
