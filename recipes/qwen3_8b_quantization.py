"""Table 2, section 4.3: Qwen3-8B at 2.25 to 4 bits, three settings of RCO beside EvoPress, IMPQ and HIGGS.

Settings from the paper: GPTQ at 2 to 8 bits, 256 FineWeb-Edu sequences of 2048 tokens, the samples and steps of
RCO, 100 generations of EvoPress, perplexity on 131k tokens of FineWeb-Edu and C4. From its published code
(recipe.py): group size 128, asymmetric grids, one sequence per sample, and RCO's initial logits. There all
samples of a step see the same sequence and GPTQ sees inputs at 4 bits; here each sample has a sequence of its
own and GPTQ sees the full model. The baselines start from nothing (--prior uniform).
"""

import sys

from recipe import CANDIDATES, QUANTIZATION_RCO, Job, Recipe, run

BITS = ("2.25", "2.5", "3.5", "4.0")
METHODS = {
    "RCO g=4 T=200": f"{QUANTIZATION_RCO} --samples 4 --steps 200",
    "RCO g=32 T=50": f"{QUANTIZATION_RCO} --samples 32 --steps 50",
    "RCO g=16 T=200": f"{QUANTIZATION_RCO} --samples 16 --steps 200",
    "EvoPress": "--searcher evopress --generations 100 --prior uniform",
    "IMPQ": "--searcher impq --prior uniform",
    "HIGGS": "--searcher higgs --prior uniform",
}
# One store of candidates for all rows.
COMMON = (
    f"--store {{out}}/candidates {CANDIDATES} --data fineweb-edu --sequences 256 --length 2048 --batch-size 1 "
    "--evaluation 64 --format dense --checkpointing --device {device} --resume"
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
