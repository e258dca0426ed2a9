"""Figure 1 and appendix C: Qwen3-30B-A3B with 25 and 50 per cent of its experts pruned, RCO beside EvoESAP."""

import sys

from recipe import GENERAL, Job, Recipe, run

COMMON = (
    "--prior reap --data fineweb-edu --sequences 256 --length 2048 --checkpointing --device {device} --resume"
)
METHODS = {"evoesap": "--searcher evoesap", "rco": "--searcher rco --steps 300 --samples 16"}
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
