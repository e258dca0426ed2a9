"""Table 1, section 4.2 and appendix C: Qwen3-Coder-Next, coding or general calibration, uniform counts or not.

The paper states the two data sets and REAP scores as initial logits. RCO's settings are those of its published
code (recipe.py), 300 steps as there. The paper generates with vLLM in bfloat16, greedily; here lm-eval runs the
checkpoint in transformers.
"""

import sys

from recipe import CODING, GENERAL, PRUNING_DATA, PRUNING_RCO, Job, Recipe, run

DATA = {"coding": "evol-codealpaca", "general": "fineweb-edu"}
COMMON = f"{PRUNING_RCO} --steps 300 {PRUNING_DATA} --checkpointing --device {{device}} --resume"
ROWS = {
    f"{share}-{domain}-{allocation}": f"--experts {share} --data {data}{' --uniform' * (allocation == 'uniform')}"
    for share in ("0.25", "0.5")
    for domain, data in DATA.items()
    for allocation in ("uniform", "nonuniform")
}
RUNS = " ".join(f"{{out}}/{name}" for name in ROWS)
RECIPE = Recipe(
    table="Qwen3-Coder-Next expert pruning (section 4.2, appendix C)",
    model="Qwen/Qwen3-Coder-Next",
    architecture="qwen3_next",
    jobs=(
        *(
            Job(name, f"prune {{model}} {settings} {COMMON} --out {{out}}/{name}")
            for name, settings in ROWS.items()
        ),
        *(
            Job(
                f"{name} benchmarks",
                f"evaluate {RUNS} --reference {{model}} --data {data} --length 2048 --tasks {tasks} "
                "--device {device}",
            )
            for name, data, tasks in (
                ("general", "fineweb-edu", GENERAL),
                ("coding", "evol-codealpaca", CODING),
            )
        ),
    ),
    tiny={"num_experts": 16},
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
