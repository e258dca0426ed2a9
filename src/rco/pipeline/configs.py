"""Settings of whole jobs. The only place of each default; command-line flags are made from the fields.

Nothing heavy is imported here, so that ``rco --help`` is fast.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from rco.data.documents import Data
from rco.settings import check_settings, device_setting, setting

__all__ = [
    "PLAIN",
    "TAU",
    "ComparePruneConfig",
    "CompareQuantizeConfig",
    "CompressConfig",
    "EvaluateConfig",
    "ExportConfig",
    "FrontierConfig",
    "PruneConfig",
    "QuantizeConfig",
    "SearchProcesses",
    "Tune",
    "TuneConfig",
]

Prior = Literal["fisher", "output-error", "weight-error", "uniform"]
ExpertPrior = Literal["fisher", "reap", "frequency", "mass", "none"]
Compute = Literal["auto", "float32", "bfloat16"]
Tune = Literal["auto", "off", "scales", "blocks", "full"]
_COMPUTE_HELP = "Type of the arithmetic; auto: float32 on a CPU, the checkpoint's elsewhere."
_GROUP_SIZE = 64
PLAIN = "rco-plain"  # Algorithm 1 as printed, see rco.core.search
TAU = (1.0, 0.1)  # first and last temperature of every other gradient search
_REFINE = 20
_STRENGTH = 3.0
_REFINE_HELP = "Most passes over the selection sequences for improving the best candidate by exchanges"


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """Settings of every kind of compression: output, text, search and machine."""

    model: str = setting(help="Built-in name, local folder, .gguf file or Hub id.")

    out: Path | None = setting(
        None,
        help="Folder of the run; the command line's default is runs/MODEL-BUDGET.",
        panel="Output",
    )

    data: Data = setting(
        "builtin",
        help="Calibration text: names (`rco ls data`), files, or mixtures such as a+b.",
        panel="Data",
        flag=str,
    )
    eval_data: Data | None = setting(
        None, help="Evaluation text; default: a held-out part of `data`.", panel="Data", flag=str | None
    )
    sequences: int = setting(
        96, help="Calibration sequences: for quantizing layers and for gradients.", panel="Data", least=1
    )
    sensitivity: int = setting(
        32, help="How many of `sequences` are used to estimate sensitivities.", panel="Data", least=1
    )
    selection: int = setting(
        16, help="Held-out sequences on which candidate allocations are compared.", panel="Data", least=1
    )
    evaluation: int = setting(
        32, help="Held-out sequences on which results are measured.", panel="Data", least=1
    )
    length: int = setting(512, help="Tokens per sequence.", panel="Data", least=2)

    searcher: str = setting("rco", help="Search method; see `rco ls methods`.", panel="Search")
    steps: int = setting(40, help="Optimizer steps.", panel="Search", least=0)
    samples: int = setting(4, help="Gumbel samples per step.", panel="Search", least=1)
    lr: float = setting(0.1, help="Learning rate.", panel="Search", positive=True)
    tau: tuple[float, float] | None = setting(
        None,
        help="First and last temperature; default 1.0 0.1, for rco-plain 1.0 0.01.",
        panel="Search",
        positive=True,
    )
    antithetic: bool = setting(
        False, help="Draw noise in opposite pairs; `samples` must be even.", panel="Search"
    )
    refine: int | None = setting(
        None, help=f"{_REFINE_HELP}; default {_REFINE}, for rco-plain none.", panel="Search", least=0
    )
    generations: int | None = setting(
        None, help="Generations of evopress and evoesap; default 100 and 50.", panel="Search", least=0
    )
    loss: Literal["kl", "cross-entropy"] = setting(
        "kl", help="Loss to minimise: KL to the original model, or cross-entropy.", panel="Search"
    )
    top_k: int = setting(
        0, help="Compute the KL over the k likeliest tokens only; 0: all.", panel="Search", least=0
    )
    seed: int = setting(0, help="Seed of the data and of the search.", panel="Search")

    device: str = device_setting("Machine")
    dtype: str = setting("auto", help="Type of the checkpoint: auto, bfloat16, float32.", panel="Machine")
    compute: Compute = setting("auto", help=_COMPUTE_HELP, panel="Machine")
    batch_size: int = setting(1, help="Sequences per forward pass of the search.", panel="Machine", least=1)
    checkpointing: bool = setting(
        False, help="Recompute activations in the backward pass, to save memory.", panel="Machine"
    )
    graphs: bool = setting(True, help="On a GPU, replay samples as a CUDA graph.", panel="Machine")
    device_map: Literal["none", "auto", "balanced", "sequential"] = setting(
        "none", help="Spread a model over several GPUs.", panel="Machine"
    )
    revision: str | None = setting(None, help="Branch, tag or commit of a Hub model.", panel="Machine")
    trust_remote_code: bool = setting(
        False, help="Run the Python code that a model ships, for models that transformers does not know.",
        panel="Machine",
    )  # fmt: skip
    rank_timeout: float = setting(
        30.0,
        help="Minutes to wait for a rank of torchrun that does not answer.",
        panel="Machine",
        positive=True,
    )
    resume: bool = setting(False, help="Continue the run in `out`.", panel="Machine")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.searcher == PLAIN and self.refine:
            raise ValueError(
                f"`searcher='{PLAIN}'` is Algorithm 1 as printed, which ends without exchanges: leave out `refine` "
                f"(got {self.refine}), or use `searcher='rco'`."
            )

    @property
    def refine_passes(self) -> int:
        """Passes over the selection text, default resolved."""
        if self.searcher == PLAIN:
            return 0
        return _REFINE if self.refine is None else self.refine

    def budgets(self) -> dict[str, str | None]:
        """Every kind of budget of this compression, with the typed value."""
        raise NotImplementedError

    @property
    def start(self) -> Any:
        """Source of the initial logits."""
        raise NotImplementedError

    @property
    def strength(self) -> float:
        """Scale of the initial logits."""
        raise NotImplementedError

    @property
    def requested(self) -> str:
        """The budget as typed."""
        return next((value for value in self.budgets().values() if value is not None), "")

    def identity(self) -> dict[str, Any]:
        """Settings that must agree for a run to be resumed."""
        described = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("out", "resume", "graphs", "device_map", "rank_timeout"):
            described.pop(name)
        for name in ("data", "eval_data"):
            described[name] = None if described[name] is None else str(described[name])
        described["tau"] = None if self.tau is None else list(self.tau)
        return described


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(CompressConfig):
    """Settings of a quantization run; the flags of ``rco quantize``."""

    bits: str | None = setting(None, help="Average width of the quantized weights, e.g. 2.5.", panel="Budget")
    bpw: str | None = setting(
        None, help="Average bits per weight, scales and zero points included.", panel="Budget"
    )
    size: str | None = setting(
        None, help="Bytes of the whole checkpoint on disk, e.g. 3.1GB.", panel="Budget"
    )
    active_bits: str | None = setting(
        None, help="Average width of the weights that a token uses; experts count as often as they are routed to.",
        panel="Budget",
    )  # fmt: skip
    flops_share: str | None = setting(
        None,
        help="A second budget: cost of all matrix products as a share of their cost at 16 bits, e.g. 0.4. 8-bit "
        "weights with 8-bit inputs cost a half, 4-bit with 4-bit a quarter, any weights with 16-bit inputs 1.",
        panel="Budget",
    )
    cost_table: Path | None = setting(
        None,
        help="A second budget from a CSV file with the columns linear (a name or kind), format and cost, such as "
        "milliseconds.",
        panel="Budget",
    )
    cost_budget: str | None = setting(
        None, help="With `cost_table`: the most that its costs may sum up to.", panel="Budget"
    )
    count: Literal["all", "experts"] = setting(
        "all",
        help="Weights that the average is taken over: all quantized ones, or experts only.",
        panel="Budget",
    )

    format: str | None = setting(
        None,
        help="Checkpoint format, see `rco ls formats`, or none; default: the one for `serve`.",
        panel="Output",
    )
    serve: str = setting(
        "any",
        help="Engine that will serve the checkpoint: any, transformers, vllm, vllm-marlin, llamacpp, gguf.",
        panel="Output",
    )
    store: Path | None = setting(
        None,
        help="Folder for quantized candidates, which runs can share; default: inside the run.",
        panel="Output",
    )
    overwrite_store: bool = setting(
        False, help="Replace candidates that were made with other settings.", panel="Output"
    )

    widths: str | None = setting(
        None,
        help="Widths to choose from, e.g. 2,3,4,8; 16 keeps a layer unquantized. Default: all that `serve` loads.",
        panel="Candidates",
    )
    formats: str | None = setting(
        None,
        help="Formats to choose from beside `widths`, e.g. nvfp4-a4,fp8-dynamic,original; see `rco ls storage`. "
        "Without `widths`, these alone.",
        panel="Candidates",
    )
    types: str | None = setting(
        None,
        help="For GGUF: ggml types to choose from, e.g. q3_k,iq4_xs,q6_k; default: IQ2 to Q8_0, where they fit.",
        panel="Candidates",
    )
    group_size: int | None = setting(
        None,
        help="Weights that share a scale, 0 for one scale per row; default 64. GGUF types have their own.",
        panel="Candidates",
        least=0,
    )
    symmetric: bool | None = setting(
        None, help="Quantize without zero points; default: as `serve` needs.", panel="Candidates"
    )
    method: Literal["gptq", "rtn", "imatrix"] | None = setting(
        None,
        help="Rounding method: gptq (default), or rtn, to nearest (default for llamacpp), where the text sets "
        "scales of inputs alone. For GGUF: imatrix (default), with an importance matrix, or rtn, without one.",
        panel="Candidates",
    )
    imatrix: Path | None = setting(
        None,
        help="For GGUF: importance matrix of llama-imatrix, instead of one measured on the calibration text.",
        panel="Candidates",
    )
    clip: Literal["search", "minmax"] = setting(
        "search",
        help="Quantization range: searched, or from the smallest to the largest weight.",
        panel="Candidates",
    )
    damp: float = setting(
        0.01,
        help="GPTQ damping: share of the mean diagonal added to the Hessian.",
        panel="Candidates",
        least=0,
    )
    act_order: bool = setting(
        False, help="GPTQ: quantize columns in order of activation size.", panel="Candidates"
    )
    sweeps: int = setting(
        4, help="Passes of coordinate descent over the codes after GPTQ.", panel="Candidates", least=0
    )
    lock: list[str] = setting(
        [], help="REGEX=WIDTH or ROLE=WIDTH (attention, mlp, experts, shared_expert), repeatable; also =FORMAT.",
        panel="Candidates",
    )  # fmt: skip
    skip: list[str] = setting(
        [],
        help="REGEX or role of layers to keep unquantized and outside the budget, repeatable.",
        panel="Candidates",
    )
    tie: list[str] = setting(
        [],
        help="Kinds of layers that share a width within a block, e.g. q_proj,k_proj; repeatable.",
        panel="Candidates",
    )

    embeddings: bool | None = setting(
        None,
        help="Also choose a format for the token embedding and the output layer, one for both if they share their "
        "weight; default: for `size`, as far as the engine reads them.",
        panel="Candidates",
    )

    expert_groups: Literal["expert", "projection", "layer", "layer-projection", "model"] | None = setting(
        None, help="Matrices of experts that share a width; default: those of one expert, or as `serve` needs.",
        panel="Experts",
    )  # fmt: skip
    per_projection: bool = setting(
        False,
        help="Short for `expert_groups='projection'`: an expert's gate and up, and its down.",
        panel="Experts",
    )
    allow_prune: bool = setting(
        False, help="Let the search remove experts, too (0 bits); the router skips them.", panel="Experts"
    )
    expert_tokens: int = setting(
        256,
        help="Fewest calibration tokens per expert; rarely visited ones get the likeliest other tokens.",
        panel="Experts",
        least=0,
    )

    prior: Prior | None = setting(
        None,
        help="Initial logits: from Fisher sensitivities, output errors, weight errors (the paper's own code), or "
        "all zero (uniform). Default fisher; for rco-plain uniform.",
        panel="Search",
    )
    prior_strength: float | None = setting(
        None,
        help=f"Scale of the initial logits; default {_STRENGTH:g}, for weight-error 1.",
        panel="Search",
        least=0,
    )

    tune: Tune = setting(
        "auto",
        help="Train the chosen codes and scales on the loss of the search, at the same size: full (end to end), "
        "blocks (block by block, then scales end to end; least memory), scales (alone), off; auto: the best "
        "for the tokens that fits memory.",
        panel="Tuning",
    )
    tune_tokens: int | None = setting(
        None,
        help="Tokens to tune on; default 1048576 on a GPU, elsewhere as many as take half the time of the search.",
        panel="Tuning",
        least=1,
    )

    memory: Literal["auto", "resident", "offload"] = setting(
        "auto",
        help="Where candidates are kept: resident on the GPU, offload in host memory, auto by free memory.",
        panel="Machine",
    )

    @property
    def start(self) -> Prior:
        """Source of the initial logits, default resolved."""
        return self.prior or ("uniform" if self.searcher == PLAIN else "fisher")

    @property
    def strength(self) -> float:
        """Scale of the initial logits, default resolved."""
        if self.prior_strength is not None:
            return self.prior_strength
        return 1.0 if self.prior == "weight-error" else _STRENGTH

    @property
    def packs_ends(self) -> bool | None:
        """Whether embedding and output layer are groups; None: as far as the engine reads them."""
        if self.embeddings is not None:
            return self.embeddings
        return None if self.size is not None and self.serve != "llamacpp" else False

    @property
    def mixes(self) -> list[str]:
        """Names that may be mixtures of llama.cpp, whose types are then offered, too."""
        return [self.size or ""]

    @property
    def engine(self) -> str:
        """Name of the engine: ``serve``, or ``gguf`` if a GGUF file is asked for."""
        asked = self.format == "gguf" or (self.out is not None and self.out.suffix == ".gguf")
        return "gguf" if asked and self.serve == "any" else self.serve

    @property
    def columns_per_scale(self) -> int | None:
        """Group size, default resolved; None for one scale per row."""
        return (_GROUP_SIZE if self.group_size is None else self.group_size) or None

    def budgets(self) -> dict[str, str | None]:
        """Bits, bits with scales, bytes, or bits of the weights that a token reads."""
        return {"bits": self.bits, "bpw": self.bpw, "size": self.size, "active_bits": self.active_bits}

    def identity(self) -> dict[str, Any]:
        """As for every job; replacement of candidates and their place in memory may differ."""
        described = super().identity()
        for name in ("overwrite_store", "memory"):
            described.pop(name)
        for name in ("store", "imatrix", "cost_table"):
            described[name] = str(getattr(self, name)) if getattr(self, name) else None
        return described


@dataclass(frozen=True, kw_only=True)
class FrontierConfig(QuantizeConfig):
    """Checkpoints of several sizes from one set of candidates; the flags of ``rco frontier``."""

    sizes: str = setting(
        "",
        help="Sizes of the checkpoints: a list such as 600MB,0.8GB,llama-q4_k_m, or a range such as 0.6GB..1.2GB.",
        panel="Budget",
    )
    points: int = setting(7, help="Sizes of a range, both ends included.", panel="Budget", least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune not in ("auto", "off") or self.tune_tokens is not None:
            raise ValueError(
                "A frontier is searched, not tuned: leave out `tune` and `tune_tokens`, and tune the size that you "
                "choose with `rco quantize`."
            )

    @property
    def mixes(self) -> list[str]:
        """Names that may be mixtures of llama.cpp."""
        return [part.strip() for part in self.sizes.split(",")]

    def listed(self) -> list[str]:
        """Sizes as typed, or the bytes of a range's sizes."""
        from rco.compression.file_size import parse_size

        named = [name for name, value in self.budgets().items() if value is not None]
        if named or not self.sizes.strip():
            raise ValueError(
                f"Give the sizes of a frontier as `sizes`, such as 0.6GB..1.2GB, and no other budget; got "
                f"`sizes={self.sizes!r}`{''.join(f' and `{name}`' for name in named)}."
            )
        if ".." not in self.sizes:
            return [part for part in self.mixes if part]
        low, high = (parse_size(end) for end in self.sizes.split("..", 1))
        if low >= high:
            raise ValueError(f"A range of `sizes` begins with the smaller one, got {self.sizes!r}.")
        return [str(low + (high - low) * k // (self.points - 1)) for k in range(self.points)]

    def single(self, size: str) -> FrontierConfig:
        """The same settings for one of the sizes."""
        return dataclasses.replace(self, size=size, tune="off")

    def folder(self) -> Path:
        """Folder of the frontier."""
        name = f"frontier-{Path(self.model).name}-{self.sizes}"
        return self.out or Path("runs") / "".join(c if c.isalnum() or c in "-._" else "-" for c in name)

    def identity(self) -> dict[str, Any]:
        """As for a run; sizes may be added later."""
        described = super().identity()
        for name in ("sizes", "points", "store"):
            described.pop(name)
        return described


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Models and measurements; the flags of ``rco evaluate``."""

    paths: list[str] = setting(help="Runs, checkpoints, Hub ids or built-in names.")
    reference: str | None = setting(None, help="Original model, for KL and relative accuracy (recovery).")
    data: Data = setting(
        "builtin", help="Text: names (`rco ls data`), files, or mixtures such as a+b.", flag=str
    )
    sequences: int = setting(48, help="Evaluation sequences.", least=1)
    length: int = setting(512, help="Tokens per sequence.", least=2)
    tasks: str | None = setting(
        None,
        help="Comma-separated: JSONL files (multiple choice, LAMBADA), names or YAML files of lm-eval tasks.",
    )
    limit: int | None = setting(None, help="Items per task.", least=1)
    batch_size: int = setting(4, help="Sequences at a time.", least=1)
    seed: int = setting(0, help="Seed for choosing the sequences.")
    device: str = device_setting()
    dtype: str = setting("auto", help="Type of the model: auto, bfloat16 or float32.")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of an export of a finished run; the flags of ``rco export``."""

    run: Path = setting(help="Folder of a finished run.")
    format: str = setting("compressed-tensors", help="Checkpoint format; see `rco ls formats`.")
    out: Path | None = setting(None, help="Folder of the checkpoint; default: RUN/FORMAT.")
    overwrite: bool = setting(False, help="Replace an existing folder.")
    device: str = device_setting()

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Settings of tuning a finished run; the flags of ``rco tune``."""

    run: Path = setting(help="Folder of a finished run of `rco quantize`.")
    tune: Tune = setting("auto", help=QuantizeConfig.__dataclass_fields__["tune"].metadata["help"])
    tune_tokens: int | None = setting(
        None, help=QuantizeConfig.__dataclass_fields__["tune_tokens"].metadata["help"], least=1
    )
    resume: bool = setting(False, help="Continue an interrupted tuning with the same settings.")
    device: str = device_setting()

    def __post_init__(self) -> None:
        check_settings(self)
        if self.tune == "off":
            raise ValueError("`tune='off'` leaves nothing to do: take auto, scales, blocks or full.")


@dataclass(frozen=True, kw_only=True)
class PruneConfig(CompressConfig):
    """Settings of a pruning run; the flags of ``rco prune``."""

    model: str = setting(help="Built-in name, local folder or Hub id of a mixture-of-experts model.")

    experts: str | None = setting(
        None, help="Experts to prune: a fraction (0.25; rounded down) or a count (48).", panel="Budget"
    )
    parameters: str | None = setting(
        None, help="Most parameters of the pruned model, e.g. 7.5M.", panel="Budget"
    )
    size: str | None = setting(
        None, help="Most bytes of the pruned checkpoint on disk, e.g. 40GB.", panel="Budget"
    )
    uniform: bool = setting(False, help="Keep the same number of experts in every layer.", panel="Budget")
    min_per_layer: int = setting(
        0,
        help="Fewest experts to keep in a layer; never below the router's top-k.",
        panel="Budget",
        least=0,
    )
    lock: list[str] = setting(
        [], help="REGEX=keep or REGEX=prune over names of experts, repeatable.", panel="Budget"
    )

    format: Literal["pruned", "none"] = setting(
        "pruned", help="pruned: a checkpoint without the pruned experts; none: no checkpoint.", panel="Output"
    )
    padded: bool = setting(
        False,
        help="Pad all layers to the same number of experts with ones that the router never picks.",
        panel="Output",
    )

    sensitivity: int = setting(
        28, help="How many of `sequences` are used for `prior='fisher'`.", panel="Data", least=1
    )
    evaluation: int = setting(
        48, help="Held-out sequences on which results are measured.", panel="Data", least=1
    )
    length: int = setting(256, help="Tokens per sequence.", panel="Data", least=2)
    by_domain: bool = setting(
        False, help="Also prune on each domain of the text alone, and measure on all of them.", panel="Data"
    )

    steps: int = setting(50, help="Optimizer steps.", panel="Search", least=0)
    prior: ExpertPrior | None = setting(
        None, help="Expert score for the initial logits; default fisher, for rco-plain none.", panel="Search"
    )
    prior_scale: Literal["rank", "global"] = setting(
        "global", help="Initial logits by rank within a layer, or by value across layers.", panel="Search"
    )
    prior_strength: float = setting(1.0, help="Scale of the initial logits.", panel="Search", least=0)
    gates: Literal["deployed", "scale"] = setting(
        "deployed",
        help="How gradients model removal: experts leave the router, or their output is scaled to zero.",
        panel="Search",
    )

    @property
    def start(self) -> ExpertPrior:
        """Score for the initial logits, default resolved."""
        return self.prior or ("none" if self.searcher == PLAIN else "fisher")

    @property
    def strength(self) -> float:
        """The scale of the initial logits."""
        return self.prior_strength

    def budgets(self) -> dict[str, str | None]:
        """Experts to prune, or parameters or bytes to keep."""
        return {"experts": self.experts, "parameters": self.parameters, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class SearchProcesses:
    """Parallel processes of a comparison."""

    workers: int | None = setting(
        None,
        help="Processes that search in parallel; default: as cores and memory allow, one on a GPU.",
        panel="Machine",
        least=1,
    )
    threads: int = setting(1, help="Threads of each process.", panel="Machine", least=1)


@dataclass(frozen=True, kw_only=True)
class CompareQuantizeConfig(SearchProcesses, QuantizeConfig):
    """Methods side by side at one or more budgets; the flags of ``rco compare quantize``."""

    methods: str = setting(
        "rco,rco@0.1,rco-plain,evopress,impq,higgs,one-at-a-time,fisher,fisher-pooled,first-order,output-error,greedy,"
        "greedy-down,random,lagrangian,augmented-lagrangian,penalty,frank-wolfe,uniform,uniform-fill,"
        "uniform-random-fill",
        help="Comma-separated; see `rco ls methods`. METHOD@0.1 has a tenth of the allowance, METHOD+prior starts "
        "from RCO's prior, METHOD+weight-error from the initial logits of the paper's own code; "
        "fisher-pooled is the knapsack of RCO's prior.",
        panel="Comparison",
    )
    seeds: int = setting(3, help="Seeds of each search; the data stay the same.", panel="Comparison", least=1)
    allowance: str | None = setting(
        None,
        help="Allowance of every search: tokens=NUMBER (a backward counts as two), seconds=NUMBER, or both; "
        "default: the tokens that rco needs.",
        panel="Comparison",
    )
    sweep: bool = setting(
        False,
        help="Also draw a front: rco at `sweep_budgets` budgets from the lowest to the highest of `bits` or "
        "`size`, each search started from the one before, with a quarter of the allowance.",
        panel="Comparison",
    )
    sweep_budgets: int = setting(9, help="Budgets of `sweep`.", panel="Comparison", least=2)
    curves: bool = setting(
        True,
        help="Also measure intermediate results of each search, with the first seed.",
        panel="Comparison",
    )
    tasks: str | None = setting(
        None,
        help="Also measure these tasks: JSONL files or lm-eval names, comma-separated.",
        panel="Comparison",
    )
    limit: int | None = setting(None, help="Items per task.", panel="Comparison", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None:
            raise ValueError(
                f"In a comparison a method's name includes its initial logits, such as rco-plain+weight-error or "
                f"evopress+prior: leave out `prior`, got {self.prior}."
            )
        if self.tune not in ("auto", "off") or self.tune_tokens is not None:
            raise ValueError(
                "A comparison measures allocations before tuning: leave out `tune` and `tune_tokens`."
            )

    @property
    def budget_kind(self) -> str:
        """The option that the budgets are given with: bits, bpw, size, ..."""
        return self._budget()[0]

    def budget_list(self) -> list[str]:
        """The budgets as typed."""
        return [part.strip() for part in (self._budget()[1] or "").split(",") if part.strip()]

    def front(self) -> list[str]:
        """Equally spaced budgets of a sweep, as exact decimals or bytes, from the lowest to the highest."""
        kind, text = self._budget()
        if kind not in ("bits", "size"):
            raise ValueError(
                "`sweep` needs `bits` or `size` with the lowest and the highest budget, such as `bits='2.25,4.0'`."
            )
        numbers = [part for part in self.budget_list() if not part.startswith(("llama-", "pure-"))]
        ends = [self._exact(kind, part) for part in numbers]
        if len(set(ends)) < 2:
            raise ValueError(f"`sweep` needs two different budgets in `{kind}`, got {text}.")
        low, high = min(ends), max(ends)
        steps = [low + (high - low) * k / (self.sweep_budgets - 1) for k in range(self.sweep_budgets)]
        # A budget that is also listed keeps its spelling, so that both have one heading.
        listed = dict(zip(ends, numbers, strict=True))
        digits = 4 if kind == "bits" else 0
        return [
            listed.get(step) or f"{Decimal(round(step * 10**digits)).scaleb(-digits).normalize():f}"
            for step in steps
        ]

    def _exact(self, kind: str, text: str) -> Fraction:
        if kind == "bits":
            return Fraction(text)
        from rco.compression.file_size import parse_size

        return Fraction(parse_size(text))

    def _budget(self) -> tuple[str, str | None]:
        named = [(kind, text) for kind, text in self.budgets().items() if text is not None]
        if len(named) != 1:
            raise ValueError(
                f"Give one kind of budget, such as `bits='2.25,2.5'`; got {[k for k, _ in named] or 'none'}."
            )
        return named[0]

    @property
    def mixes(self) -> list[str]:
        """Names that may be mixtures of llama.cpp: sizes and methods."""
        listed = f"{self.methods},{self.size or ''}".split(",")
        return [name.strip() for name in listed]

    def single(self, budget: str) -> QuantizeConfig:
        """The same settings with one budget and no checkpoint, so that export rules do not apply."""
        named: dict[str, Any] = {
            self.budget_kind: budget,
            "format": "none",
            "serve": self.engine,
            "tune": "off",
        }
        return dataclasses.replace(self, **named)

    def folder(self) -> Path:
        """Folder of the comparison."""
        kind, text = self._budget()
        name = f"compare-{Path(self.model).name}-{kind}-{text}"
        return self.out or Path("runs") / "".join(c if c.isalnum() or c in "-._" else "-" for c in name)

    def identity(self) -> dict[str, Any]:
        """As for a run; budgets, seeds and methods may be added to a comparison later."""
        described = super().identity()
        free = (
            *self.budgets(),
            "seeds",
            "methods",
            "searcher",
            "format",
            "store",
            "sweep",
            "sweep_budgets",
            "curves",
            "workers",
            "threads",
        )
        for name in free:
            described.pop(name)
        return described


@dataclass(frozen=True, kw_only=True)
class ComparePruneConfig(SearchProcesses, PruneConfig):
    """Methods side by side on one pruning problem; the flags of ``rco compare prune``."""

    methods: str = setting(
        "rco,rco-plain,evoesap,greedy,reap,reap-global,frequency,frequency-global,random-pick",
        help="Comma-separated; see `rco ls methods`, and the scores reap, frequency, mass (with -global). "
        "METHOD-SCORE starts from a score: rco-plain-reap; rco-plain alone starts from zero logits.",
        panel="Comparison",
    )
    seeds: int = setting(
        3,
        help="Seeds of each search; fixed rules run once per seed of the data.",
        panel="Comparison",
        least=1,
    )
    tokens: int | None = setting(
        None,
        help="Tokens that every search may forward (a backward counts as two); default: what rco needs.",
        panel="Comparison",
        least=1,
    )

    def identity(self) -> dict[str, Any]:
        """As for a run; more seeds or methods may be added to a comparison later."""
        described = super().identity()
        free = ("seeds", "methods", "format", "padded", "by_domain", "searcher", "seed", "workers", "threads")
        for name in free:
            described.pop(name)
        return described
