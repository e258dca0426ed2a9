"""Compression of language models from Python: ``rco.quantize``, ``rco.prune``, ``rco.evaluate``.

The arguments are the settings of :mod:`rco.pipeline.configs`, from which the command line's flags are made as well:
names, defaults and meaning are the same.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from rco.atomic_files import link_file
from rco.compressed import CompressedModel
from rco.data.documents import Data, Texts
from rco.export.gguf_container import written_file
from rco.models.loading import LoadedModel, checkpoint_of, load, refuse_quantized, wrap_model
from rco.models.zoo import ModelError
from rco.pipeline.compress import compress as run_job
from rco.pipeline.configs import (
    CompressConfig,
    Compute,
    EvaluateConfig,
    ExpertPrior,
    Prior,
    PruneConfig,
    QuantizeConfig,
    Tune,
)
from rco.pipeline.evaluate import evaluate as measure_models
from rco.pipeline.planning import file_and_folder
from rco.pipeline.progress import Progress, ProgressEvent, follow

__all__ = ["compress", "evaluate", "load", "prune", "quantize"]

Model = str | Path | nn.Module
Amount = str | float | Fraction | Decimal | None
Text = Data | Iterable[Any]  # a name, files, or a list of strings and conversations
Shown = bool | Callable[[ProgressEvent], object] | Progress
F = TypeVar("F", bound=Callable[..., Any])

_AMOUNTS = (
    "bits", "bpw", "size", "active_bits", "experts", "parameters", "flops_share", "cost_budget",
)  # fmt: skip
_EXTRA = {
    "tokenizer": "The tokenizer of a loaded model; not for a model given by name.",
    "progress": "True: bars on a terminal, lines elsewhere. False: nothing. Or a function that is called with a "
    "ProgressEvent; an exception that it raises ends the call.",
    "inplace": "Turn the given model into the compressed one, instead of making a copy.",
}


def _documented(config: type) -> Callable[[F], F]:
    """Add a description of every argument to a docstring, from the help texts of the settings."""

    def add(function: F) -> F:
        fields = {field.name: field for field in dataclasses.fields(config)}
        lines = ["Args:"]
        for name in function.__annotations__:
            if name == "return":
                continue
            text = fields[name].metadata["help"] if name in fields else _EXTRA.get(name)
            if text is None:
                continue
            if name == "model":
                text += " Or a loaded transformers model."
            wrapped = textwrap.wrap(
                f"{name}: {text}",
                width=100,
                initial_indent="    ",
                subsequent_indent="        ",
                break_on_hyphens=False,
            )
            lines += wrapped
        before, title, after = textwrap.dedent(f"    {function.__doc__ or ''}").partition("Returns:\n")
        function.__doc__ = before + "\n".join(lines) + "\n\n" + title + after
        return function

    return add


@_documented(QuantizeConfig)
def quantize(
    model: Model,
    tokenizer: Any = None,
    *,
    bits: Amount = QuantizeConfig.bits,
    bpw: Amount = QuantizeConfig.bpw,
    size: Amount = QuantizeConfig.size,
    active_bits: Amount = QuantizeConfig.active_bits,
    flops_share: Amount = QuantizeConfig.flops_share,
    cost_table: str | Path | None = QuantizeConfig.cost_table,
    cost_budget: Amount = QuantizeConfig.cost_budget,
    count: Literal["all", "experts"] = QuantizeConfig.count,
    out: str | Path | None = QuantizeConfig.out,
    format: str | None = QuantizeConfig.format,
    serve: str = QuantizeConfig.serve,
    store: str | Path | None = QuantizeConfig.store,
    overwrite_store: bool = QuantizeConfig.overwrite_store,
    widths: str | Sequence[int] | None = QuantizeConfig.widths,
    formats: str | Sequence[str] | None = QuantizeConfig.formats,
    types: str | Sequence[str] | None = QuantizeConfig.types,
    group_size: int | None = QuantizeConfig.group_size,
    symmetric: bool | None = QuantizeConfig.symmetric,
    method: Literal["gptq", "rtn", "imatrix"] | None = QuantizeConfig.method,
    imatrix: str | Path | None = QuantizeConfig.imatrix,
    clip: Literal["search", "minmax"] = QuantizeConfig.clip,
    damp: float = QuantizeConfig.damp,
    act_order: bool = QuantizeConfig.act_order,
    sweeps: int = QuantizeConfig.sweeps,
    lock: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    tie: str | Sequence[str] = (),
    embeddings: bool | None = QuantizeConfig.embeddings,
    expert_groups: Literal["expert", "projection", "layer", "layer-projection", "model"]
    | None = QuantizeConfig.expert_groups,
    per_projection: bool = QuantizeConfig.per_projection,
    allow_prune: bool = QuantizeConfig.allow_prune,
    expert_tokens: int = QuantizeConfig.expert_tokens,
    data: Text = QuantizeConfig.data,
    eval_data: Text | None = QuantizeConfig.eval_data,
    sequences: int = QuantizeConfig.sequences,
    sensitivity: int = QuantizeConfig.sensitivity,
    selection: int = QuantizeConfig.selection,
    evaluation: int = QuantizeConfig.evaluation,
    length: int = QuantizeConfig.length,
    searcher: str = QuantizeConfig.searcher,
    steps: int = QuantizeConfig.steps,
    samples: int = QuantizeConfig.samples,
    lr: float = QuantizeConfig.lr,
    tau: tuple[float, float] | None = QuantizeConfig.tau,
    antithetic: bool = QuantizeConfig.antithetic,
    refine: int | None = QuantizeConfig.refine,
    generations: int | None = QuantizeConfig.generations,
    loss: Literal["kl", "cross-entropy"] = QuantizeConfig.loss,
    top_k: int = QuantizeConfig.top_k,
    prior: Prior | None = QuantizeConfig.prior,
    prior_strength: float | None = QuantizeConfig.prior_strength,
    tune: Tune = QuantizeConfig.tune,
    tune_tokens: int | None = QuantizeConfig.tune_tokens,
    seed: int = QuantizeConfig.seed,
    device: str = QuantizeConfig.device,
    dtype: str = QuantizeConfig.dtype,
    compute: Compute = QuantizeConfig.compute,
    batch_size: int = QuantizeConfig.batch_size,
    checkpointing: bool = QuantizeConfig.checkpointing,
    graphs: bool = QuantizeConfig.graphs,
    memory: Literal["auto", "resident", "offload"] = QuantizeConfig.memory,
    device_map: Literal["none", "auto", "balanced", "sequential"] = QuantizeConfig.device_map,
    revision: str | None = QuantizeConfig.revision,
    trust_remote_code: bool = QuantizeConfig.trust_remote_code,
    rank_timeout: float = QuantizeConfig.rank_timeout,
    resume: bool = QuantizeConfig.resume,
    progress: Shown = True,
    inplace: bool = False,
) -> CompressedModel:
    """Quantize a language model to an exact budget, with a width chosen for every layer.

    Give one budget: ``bits``, ``bpw``, ``size`` or ``active_bits``. Nothing is written unless ``out`` or ``store``
    is given. A given model is not modified, unless ``inplace``.

        result = rco.quantize("Qwen/Qwen3-8B", bits=2.5)
        result = rco.quantize(model, tokenizer, size="3.1GB", data=texts)
        result.model.generate(...)
        result.save("checkpoint")

    ``data`` and ``eval_data`` are names (`rco ls data`), files, or lists of strings and of conversations, which are
    lists of ``{"role", "content"}`` messages. One document in five of a file or list is held back for evaluation.

    Returns:
        The compressed model with its allocation and measurements; None on ranks of torchrun other than 0.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The budget is infeasible, the data are too short, the model cannot be compressed, ...; the
            message says what was given, what is allowed and what to do.
    """
    return _compress(QuantizeConfig, **locals())


@_documented(PruneConfig)
def prune(
    model: Model,
    tokenizer: Any = None,
    *,
    experts: Amount = PruneConfig.experts,
    parameters: Amount = PruneConfig.parameters,
    size: Amount = PruneConfig.size,
    uniform: bool = PruneConfig.uniform,
    min_per_layer: int = PruneConfig.min_per_layer,
    lock: str | Sequence[str] = (),
    out: str | Path | None = PruneConfig.out,
    format: Literal["pruned", "none"] = PruneConfig.format,
    padded: bool = PruneConfig.padded,
    data: Text = PruneConfig.data,
    eval_data: Text | None = PruneConfig.eval_data,
    sequences: int = PruneConfig.sequences,
    sensitivity: int = PruneConfig.sensitivity,
    selection: int = PruneConfig.selection,
    evaluation: int = PruneConfig.evaluation,
    length: int = PruneConfig.length,
    by_domain: bool = PruneConfig.by_domain,
    searcher: str = PruneConfig.searcher,
    steps: int = PruneConfig.steps,
    samples: int = PruneConfig.samples,
    lr: float = PruneConfig.lr,
    tau: tuple[float, float] | None = PruneConfig.tau,
    antithetic: bool = PruneConfig.antithetic,
    refine: int | None = PruneConfig.refine,
    generations: int | None = PruneConfig.generations,
    loss: Literal["kl", "cross-entropy"] = PruneConfig.loss,
    top_k: int = PruneConfig.top_k,
    prior: ExpertPrior | None = PruneConfig.prior,
    prior_scale: Literal["rank", "global"] = PruneConfig.prior_scale,
    prior_strength: float = PruneConfig.prior_strength,
    gates: Literal["deployed", "scale"] = PruneConfig.gates,
    seed: int = PruneConfig.seed,
    device: str = PruneConfig.device,
    dtype: str = PruneConfig.dtype,
    compute: Compute = PruneConfig.compute,
    batch_size: int = PruneConfig.batch_size,
    checkpointing: bool = PruneConfig.checkpointing,
    graphs: bool = PruneConfig.graphs,
    device_map: Literal["none", "auto", "balanced", "sequential"] = PruneConfig.device_map,
    revision: str | None = PruneConfig.revision,
    trust_remote_code: bool = PruneConfig.trust_remote_code,
    rank_timeout: float = PruneConfig.rank_timeout,
    resume: bool = PruneConfig.resume,
    progress: Shown = True,
    inplace: bool = False,
) -> CompressedModel:
    """Prune the least important experts of a mixture-of-experts model to an exact budget.

    Give one budget: ``experts``, ``parameters`` or ``size``. All else is as for :func:`quantize`.

        result = rco.prune("allenai/OLMoE-1B-7B-0125-Instruct", experts=0.25)
        result.model.generate(...)

    Returns:
        The pruned model with its allocation and measurements; None on ranks of torchrun other than 0.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The budget is infeasible, the data are too short, the model has no experts, ...
    """
    return _compress(PruneConfig, **locals())


@_documented(EvaluateConfig)
def evaluate(
    models: Model | CompressedModel | Sequence[Model | CompressedModel],
    tokenizer: Any = None,
    *,
    reference: Model | CompressedModel | None = None,
    data: Text = EvaluateConfig.data,
    sequences: int = EvaluateConfig.sequences,
    length: int = EvaluateConfig.length,
    tasks: str | Sequence[str] | None = EvaluateConfig.tasks,
    limit: int | None = EvaluateConfig.limit,
    batch_size: int = EvaluateConfig.batch_size,
    seed: int = EvaluateConfig.seed,
    device: str = EvaluateConfig.device,
    dtype: str = EvaluateConfig.dtype,
    progress: Shown = True,
) -> Any:
    """Measure models on the same text: perplexity, KL to a reference, tasks, size.

        row = rco.evaluate(result, reference="tiny-llama")
        rows = rco.evaluate(["tiny-llama", "runs/a", "runs/b"], reference="tiny-llama")

    A model is a name, a folder (also of a run), a loaded model with ``tokenizer``, or a :class:`CompressedModel`.
    Of files and lists of text, the held-back part is used: one document in five.

    Returns:
        For one model a dictionary: ``perplexity``, ``bytes`` if it has files, ``kl`` with a reference, ``tasks``.
        For a list of models a list of such dictionaries, in the same order.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A model cannot be loaded, the data are too short, a task cannot be run, ...
    """
    several = isinstance(models, Sequence) and not isinstance(models, str)
    listed: list[Any] = list(cast(Sequence[Any], models)) if several else [models]
    if not listed:
        raise ValueError("`models` is empty: pass one model or a list of models.")
    given: dict[str, LoadedModel] = {}
    with ExitStack() as stack:
        labels = [_label(one, tokenizer, given, stack) for one in listed]
        base = None if reference is None else _label(reference, tokenizer, given, stack)
        config = EvaluateConfig(
            paths=labels,
            reference=base,
            data=_text(data),
            sequences=sequences,
            length=length,
            tasks=_joined(tasks),
            limit=limit,
            batch_size=batch_size,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        told = stack.enter_context(follow(progress))
        rows = {row["model"]: row for row in measure_models(config, told, given)}
    found = [rows[label if label in rows else str(checkpoint_of(label))] for label in labels]
    return found if several else found[0]


def compress(
    config: CompressConfig,
    given: LoadedModel | None = None,
    *,
    progress: Shown = True,
    inplace: bool = False,
    tell_device: bool = False,
) -> CompressedModel | None:
    """Compress a model; :func:`quantize` and :func:`prune` call this.

    Args:
        config: All settings; the kind of compression is that of their class.
        given: A model in memory, instead of the one named in ``config``; not modified unless ``inplace``.
        progress: As for :func:`quantize`.
        inplace: Turn the given model into the compressed one.
        tell_device: Report the device first.

    Returns:
        The compressed model; None on ranks of torchrun other than 0.
    """
    if inplace and given is None:
        raise ValueError(
            "`inplace=True` needs a loaded model, not a name; pass a model, or leave out `inplace`."
        )
    if config.resume and config.out is None:
        raise ValueError("`resume=True` continues the run in a folder: pass the folder as `out`.")
    config, file = file_and_folder(config)
    with ExitStack() as stack:
        told = stack.enter_context(follow(progress))
        if tell_device:
            told.message(f"device: {config.device}")
        folder = config.out
        if folder is None:  # removed at the end, even after an error
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rco-"))) / "run"
        if given is not None:
            stack.enter_context(_frozen(given.model))
        settled = dataclasses.replace(config, out=folder)
        outcome = run_job(settled, told, given, temporary=config.out is None)
        if outcome is None:
            return None
        if file is not None and outcome.checkpoint is not None:
            link_file(written_file(outcome.checkpoint), file)
            outcome = dataclasses.replace(outcome, checkpoint=file)
        owner = None if given is None else given.model
        return CompressedModel(outcome, config, owner=owner, inplace=inplace)


def _compress(
    kind: type[CompressConfig],
    *,
    model: Model,
    tokenizer: Any,
    progress: Shown,
    inplace: bool,
    **settings: Any,
) -> CompressedModel:
    """Convert arguments from Python to the settings of a job, and run it."""
    given: LoadedModel | None = None
    with ExitStack() as stack:
        if isinstance(model, nn.Module):
            stack.enter_context(_frozen(model))
            given = _wrapped(model, tokenizer, settings)
            refuse_quantized(given.model.config, given.name)
            name, settings["device"] = given.name, str(given.device)
        elif isinstance(model, str | Path):
            if tokenizer is not None:
                raise TypeError("`tokenizer` is for a loaded model; leave it out for a model given by name.")
            name = str(model)
        else:
            raise TypeError(
                f"`model` must be a name, a folder or a loaded model, got {type(model).__name__}."
            )
        chosen_here = settings.get("device") == "auto"
        fields = {field.name for field in dataclasses.fields(kind)}
        assert settings.keys() <= fields, sorted(settings.keys() - fields)
        config = kind(model=name, **{key: _plain(key, value) for key, value in settings.items()})
        # None is returned on ranks of torchrun other than 0; scripts check for it.
        found = compress(config, given, progress=progress, inplace=inplace, tell_device=chosen_here)
        return cast(CompressedModel, found)


# ---------------------------------------------------------------------- models


def _wrapped(model: nn.Module, tokenizer: Any, settings: dict[str, Any]) -> LoadedModel:
    """Check and wrap a given model, with its own device and type."""
    if not hasattr(model, "config"):
        raise ModelError(
            f"{type(model).__name__} is not a Hugging Face language model: it has no config. Pass one that "
            "AutoModelForCausalLM loads, or use rco.minimize for a problem of your own."
        )
    if tokenizer is None:
        raise TypeError("A loaded model needs its tokenizer: pass it as the second argument, `tokenizer`.")
    if not callable(tokenizer):
        raise TypeError(f"`tokenizer` must be a Hugging Face tokenizer, got {type(tokenizer).__name__}.")
    if any(module.training for module in model.modules()):
        raise ModelError("The model is in training mode: call model.eval() first.")
    strange = next((p for p in model.parameters() if not p.is_floating_point() or p.element_size() < 2), None)
    if strange is not None:
        raise ModelError(
            f"The model has {str(strange.dtype).removeprefix('torch.')} weights: it is quantized already. Pass the "
            "full-precision model."
        )
    given = wrap_model(model, tokenizer, name=_name_of(model))
    wanted = settings.get("device")
    if wanted not in (None, "auto") and torch.device(wanted).type != given.device.type:
        raise ModelError(
            f"The model is on {given.device}, but `device` is {wanted}: move it first with model.to({wanted!r}), "
            "or leave `device` out."
        )
    kept = str(given.dtype).removeprefix("torch.")
    if settings.get("dtype") not in ("auto", kept):
        raise ModelError(
            f"The model is in {kept}, but `dtype` is {settings['dtype']}: load it in that type, or leave out "
            "`dtype`."
        )
    if settings.get("device_map", "none") != "none":
        raise ModelError("`device_map` is for models that are loaded by name; leave it out.")
    return given


def _name_of(model: nn.Module) -> str:
    named = str(getattr(model.config, "_name_or_path", "") or "")
    return Path(named).name or type(model).__name__


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Disable gradients of all parameters inside; restore them afterwards."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def _label(
    model: Model | CompressedModel, tokenizer: Any, given: dict[str, LoadedModel], stack: ExitStack
) -> str:
    """Name of a model in tables; a model in memory is added to ``given`` under that name."""
    if isinstance(model, str | Path):
        return str(model)
    if isinstance(model, CompressedModel):
        module, tokenizer = model.model, model.tokenizer
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise TypeError(
            f"A model must be a name, a folder, a loaded model or a CompressedModel, got {type(model).__name__}."
        )
    known = next((label for label, loaded in given.items() if loaded.model is module), None)
    if known is not None:
        return known
    stack.enter_context(_frozen(module))
    loaded = _wrapped(module, tokenizer, {"dtype": "auto"})
    label = next(
        name
        for number in range(1, len(given) + 2)
        if (name := loaded.name if number == 1 else f"{loaded.name} ({number})") not in given
    )
    given[label] = loaded
    return label


# -------------------------------------------------------------------- settings


def _plain(name: str, value: Any) -> Any:
    """A setting in the form of its field: budgets as text, lists as on the command line, paths as paths."""
    if name in _AMOUNTS:
        return _amount(name, value)
    if name in ("data", "eval_data") and value is not None:
        return _text(value)
    if name in ("widths", "formats", "types", "tasks"):
        return _joined(value)
    if name in ("lock", "skip", "tie"):
        return [value] if isinstance(value, str) else list(value)
    if name in ("out", "store", "imatrix", "cost_table") and isinstance(value, str):
        return Path(value).expanduser()
    if name == "tau" and isinstance(value, list):
        return tuple(value)
    return value


def _amount(name: str, value: Any) -> str | None:
    """A budget as text, so that 2.3 means 23/10."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise TypeError(f"`{name}` must be a number or a string, got {value!r} ({type(value).__name__}).")
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Rational | Decimal):
        return str(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number, got {value}.")
    # A size in bytes is a whole number, even if computed as a float.
    return str(int(number)) if number == int(number) and name in ("size", "parameters") else repr(number)


def _text(data: Any) -> Data:
    if isinstance(data, str | Path | Texts):
        return data
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise TypeError(
            f"`data` must be a name, a file, or a list of strings or conversations, got {type(data).__name__}."
        )
    return Texts(data)


def _joined(values: Any) -> str | None:
    if values is None or isinstance(values, str):
        return values
    return ",".join(map(str, values))
