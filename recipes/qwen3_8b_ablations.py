"""Appendix E: the nine sweeps of the search's settings on Qwen3-8B at 2.5 bits, around T = 200 and g = 4.

Settings from the paper: 256 FineWeb-Edu sequences of 2048 tokens, learning rate 0.1, last temperature 0.01, and
the values of each sweep. The initial logits of Algorithm 1 are those of its published code. The paper ran most
points once; three seeds are our choice, and the whole search of this package is run beside each point. It also
has 512 and 1024 sequences, and C4; here the other sizes are parts of 256. Its table of scaling is made of the
first and third sweep.
"""

import sys

from recipe import Job, Recipe, run

SETTINGS = (
    "--bits 2.5 --steps 200 --samples 4 --lr 0.1 --tau 0.01 --printed-prior weight-error --group-size 128 "
    "--data fineweb-edu --sequences 256 --length 2048 --evaluation 64 --device {device} --out {out} --resume"
)
SWEEPS = (
    "samples=1,4,8,16", "steps=100,200,400", "equal-compute=8x100,16x200,32x50",
    "temperature=0.05,0.01,0.005,0.001", "learning-rate=0.05,0.1,0.2", "antithetic", "seeds", "grouping",
    "calibration",
)  # fmt: skip
RECIPE = Recipe(
    table="Ablations of mixed-precision quantization (appendix E)",
    model="Qwen/Qwen3-8B",
    architecture="qwen3",
    # One folder: parts that sweeps share are run once.
    jobs=tuple(
        Job(
            name.partition("=")[0],
            f"benchmarks/ablations.py --model {{model}} --sweep {name} --seeds 3 {SETTINGS}",
        )
        for name in SWEEPS
    ),
    tiny={"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
)

if __name__ == "__main__":
    sys.exit(run(RECIPE))
