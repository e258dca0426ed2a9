"""Appendix C: OLMoE-1B-7B at 25 per cent, RCO at 50 to 500 steps beside REAP and EvoESAP, eight benchmarks."""

import sys

from recipe import GENERAL, Job, Recipe, run

STEPS = (50, 100, 150, 200, 300, 500)
COMMON = (
    "--experts 0.25 --prior reap --data fineweb-edu --sequences 256 --length 2048 --checkpointing "
    "--device {device} --resume"
)
METHODS = {
    "reap": "--searcher top-per-block --uniform",
    "evoesap": "--searcher evoesap",
    **{f"rco-{steps}": f"--searcher rco --steps {steps} --samples 16" for steps in STEPS},
}
RECIPE = Recipe(
    table="OLMoE-1B-7B: iteration sweep (appendix C)",
    model="allenai/OLMoE-1B-7B-0924",
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
