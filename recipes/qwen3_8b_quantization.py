"""Table 2, section 4.3: Qwen3-8B at 2.25 to 4 bits, three settings of RCO beside EvoPress, IMPQ and HIGGS.

Settings from the paper: GPTQ at 2 to 8 bits, 256 FineWeb-Edu sequences of 2048 tokens, perplexity on 131k tokens of
FineWeb-Edu and C4. The group size is not stated there; 128 is what its other quantization table uses. The baselines
start from nothing (--prior uniform); RCO's prior is its own.
"""

import sys

from recipe import Job, Recipe, run

BITS = ("2.25", "2.5", "3.5", "4.0")
METHODS = {
    "RCO g=4 T=200": "--searcher rco --samples 4 --steps 200 --lr 0.1 --tau 1.0 0.01",
    "RCO g=32 T=50": "--searcher rco --samples 32 --steps 50 --lr 0.1 --tau 1.0 0.01",
    "RCO g=16 T=200": "--searcher rco --samples 16 --steps 200 --lr 0.1 --tau 1.0 0.01",
    "EvoPress": "--searcher evopress --prior uniform",
    "IMPQ": "--searcher impq --prior uniform",
    "HIGGS": "--searcher higgs --prior uniform",
}
# One store of candidates for all rows.
COMMON = (
    "--store {out}/candidates --widths 2,3,4,5,6,7,8 --group-size 128 --data fineweb-edu --sequences 256 "
    "--length 2048 --evaluation 64 --format dense --checkpointing --device {device} --resume"
)


def folder(bits: str, method: str) -> str:
    return "{out}/" + f"{bits}-{method}".replace(" ", "-").replace("=", "").lower()


SEARCHES = tuple(
    Job(
        f"{bits} bits, {method}",
        f"quantize {{model}} --bits {bits} {settings} {COMMON} --out {folder(bits, method)}",
    )
    for bits in BITS
    for method, settings in METHODS.items()
)
RUNS = " ".join(folder(bits, method) for bits in BITS for method in METHODS)
EVALUATIONS = tuple(
    Job(
        f"perplexity on {data}",
        f"evaluate {RUNS} --reference {{model}} --data {data} --sequences 64 --length 2048 --device {{device}}",
    )
    for data in ("fineweb-edu", "c4")
)
RECIPE = Recipe(
    table="Qwen3-8B mixed-precision quantization (section 4.3)",
    model="Qwen/Qwen3-8B",
    architecture="qwen3",
    jobs=SEARCHES + EVALUATIONS,
    tiny={"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
