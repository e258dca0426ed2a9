"""Candidates of every linear at every width, built block by block and written to the store in the background.

One Hessian per distinct input serves all widths. Blocks get the full model's hidden states, so candidates do not
depend on an allocation, and one store serves every budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rco.compression.plan import CompressionPlan
from rco.data.calibration import CalibrationSet
from rco.distributed import Ranks
from rco.formats import encode_all
from rco.formats.base import EncodeSettings, Format, Stored
from rco.formats.hessian import HessianAccumulator, InputPeak, InputSquares
from rco.formats.removed import REMOVED
from rco.formats.stacks import stack_rows
from rco.models.capture import BlockInputs, WholePasses, block_inputs, linear_inputs
from rco.models.checkpoint_files import file_sha256
from rco.models.embeddings import EMBEDDING_ROLE
from rco.models.imatrix_file import ImportanceMatrix
from rco.models.layout import LinearInfo
from rco.models.loading import LoadedModel
from rco.models.moe.decisions import watch_decisions
from rco.models.moe.expert_statistics import ExpertHessians
from rco.models.moe.layers import MoELayer
from rco.models.moe.linears import ExpertLinear, original_stacks
from rco.store import CandidateStore

__all__ = [
    "CandidateSettings",
    "build_candidates",
    "candidate_identity",
    "candidate_name",
    "expert_layer_of",
    "importance_source",
    "kept_experts",
    "measure_importances",
    "packed_candidate",
    "quantize_experts",
    "quantize_matrix",
    "read_importances",
    "reads_text",
    "recorded",
    "replace_candidates",
    "tensor_importances",
    "tuned_candidates",
]

logger = logging.getLogger(__name__)

AccumulatorT = TypeVar("AccumulatorT", bound=HessianAccumulator | InputPeak | InputSquares)
Method = Literal["gptq", "rtn", "imatrix"]


@dataclass(frozen=True, kw_only=True)
class CandidateSettings:
    """Settings of candidates beyond the plan's widths and grid."""

    method: Method = "gptq"
    damp: float = 0.01
    act_order: bool = False
    clip: Literal["search", "minmax"] = "search"
    sweeps: int = 4
    batch_size: int = 8
    expert_tokens: int = 256  # fewest tokens that an expert is fitted to
    imatrix: Path | None = None  # importance matrix to use instead of a measured one

    def arguments(self) -> dict[str, object]:
        """Arguments for the quantizer of one matrix."""
        if self.method == "imatrix":
            return {}
        if self.method == "rtn":
            return {"clip": self.clip}
        return {"damp": self.damp, "act_order": self.act_order, "clip": self.clip, "sweeps": self.sweeps}


def candidate_name(info: LinearInfo) -> str:
    """Name of a linear's candidates in a store; those of a layer's experts are stacked under one name."""
    return info.stored_in if isinstance(info, ExpertLinear) else info.name


def candidate_identity(
    loaded: LoadedModel,
    plan: CompressionPlan,
    calibration: CalibrationSet,
    settings: CandidateSettings,
    dtype: torch.dtype,
) -> dict[str, object]:
    """Everything the candidates depend on; two runs share a store only if all of it agrees."""
    # The experts of a layer are one entry, under the name of their stacked tensor.
    names = [candidate_name(info) for info in plan.linears]
    identity: dict[str, object] = {
        "model": loaded.fingerprint,
        "data": calibration.fingerprint if reads_text(plan, settings) else None,
        "widths": [option.bits for option in plan.packed],
        "formats": [option.name for option in plan.packed] if plan.gguf is None else "GGUF",
        "group_size": plan.group_size if plan.gguf is None else "GGUF",
        "symmetric": plan.symmetric if plan.gguf is None else "GGUF",
        "linears": list(dict.fromkeys(names)),
        "storage": str(dtype).removeprefix("torch."),
        "method": settings.method,
        "damp": settings.damp,
        "act_order": settings.act_order,
        "clip": settings.clip,
        "sweeps": settings.sweeps,
    }
    if plan.experts and settings.method != "rtn":
        identity["expert_tokens"] = settings.expert_tokens
    if settings.imatrix is not None:
        identity["imatrix"] = file_sha256(settings.imatrix)
    return identity


def reads_text(plan: CompressionPlan, settings: CandidateSettings) -> bool:
    """Whether candidates depend on the calibration text: by errors to compensate, or by a fixed scale of inputs."""
    if settings.method == "rtn":
        return any(option.calibrates_inputs for option in plan.packed)
    return settings.imatrix is None


def blocks_of(plan: CompressionPlan) -> list[list[LinearInfo]]:
    """The plan's linears by block; those outside of the blocks, and the two ends, have one of their own."""
    by_block: dict[int, list[LinearInfo]] = {}
    outer: list[LinearInfo] = []
    head: list[LinearInfo] = []
    for info in plan.linears:
        if info.block is not None:
            by_block.setdefault(info.block, []).append(info)
        else:
            (outer if info.role == "outer" else head).append(info)
    return [by_block[index] for index in sorted(by_block)] + [each for each in (outer, head) if each]


def build_candidates(
    loaded: LoadedModel,
    plan: CompressionPlan,
    calibration: CalibrationSet,
    store: CandidateStore,
    settings: CandidateSettings,
    storage_dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
    importances: ImportanceMatrix | None = None,
) -> None:
    """Make the candidates that the store is missing.

    In each round every rank makes one missing block. Its file is written and entered in the store while the rank
    makes its next block.

    Args:
        loaded: The full model, computing in its present type.
        plan: Linears, widths and grid.
        calibration: Sequences for the Hessians.
        store: Store created for :func:`candidate_identity`.
        settings: How to quantize.
        storage_dtype: Type of the scales: the checkpoint's.
        on_progress: Called with (linears done, total linears).
        ranks: Processes that share the work; all of them call this, with stores of the same content.
        importances: For the method ``imatrix``: mean squared inputs by tensor of the GGUF file.
    """
    ranks = ranks or Ranks()
    groups = blocks_of(plan)
    missing = store.missing_blocks
    total = sum(len(group) for group in groups)
    done: float = total - sum(len(groups[index]) for index in missing)

    def advance(count: float) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(min(round(done), total), total)

    advance(0)
    if not missing:
        return
    inputs = (
        block_inputs(
            loaded.model, loaded.layout, calibration.tokens, batch_size=settings.batch_size, storage="cpu"
        )
        if settings.method != "imatrix" and reads_text(plan, settings)
        else None
    )

    def make(index: int, sharers: int) -> Callable[[], dict[str, Any]]:
        """Make a block's candidates; the returned function writes them."""
        group = groups[index]
        linears = [info for info in group if not isinstance(info, ExpertLinear)]
        sparse = expert_layer_of(group)
        hessians: Mapping[str, HessianAccumulator | InputPeak] = {}
        experts: ExpertHessians | None = None
        if inputs is not None:
            kind: type[HessianAccumulator | InputPeak] = (
                HessianAccumulator if settings.method == "gptq" else InputPeak
            )
            block, outer = group[0].block, group[0].role == "outer"
            target = len(loaded.layout.blocks(loaded.model)) if block is None else block
            while inputs.position < target and not outer:
                inputs.advance()
            if sparse is not None and settings.method == "gptq":
                experts = ExpertHessians(sparse, calibration.tokens.numel(), settings.expert_tokens)
            if outer:
                hessians = _outer_hessians(loaded, calibration.tokens, settings.batch_size, linears, kind)
            elif block is None:
                hessians = _head_hessian(inputs, group, kind)
            else:
                hessians = _block_hessians(loaded, inputs, linears, experts, kind)
        candidates: dict[str, dict[str, Stored]] = {}
        statistics: dict[str, dict[str, dict[str, Any]]] = {}
        weight_peaks = _merged_peaks(loaded, linears)
        for info in linears:
            accumulator, grids = hessians.get(info.name), _grids(plan, info)
            # A linear whose weight is read without calling it, or that no token reaches, is rounded to nearest.
            inputs_of = None
            if isinstance(accumulator, HessianAccumulator) and accumulator.tokens:
                inputs_of = accumulator.matrix()
            if importances is not None:
                rows = tensor_importances(plan, importances, info)
                inputs_of = None if rows is None else rows[0]
            peaks = {"weight_peak": weight_peaks[info.name]}
            if accumulator is not None and accumulator.tokens:
                peaks["input_peak"] = accumulator.peak
            packed, errors, relative = quantize_matrix(
                info.weight.detach().float(),
                inputs_of,
                list(grids.values()),
                {**settings.arguments(), **peaks},
                storage_dtype,
            )
            candidates[info.name] = dict(zip(grids, packed, strict=True))
            statistics[info.name] = {
                label: {"error": error, "relative_error": share}
                for label, error, share in zip(grids, errors, relative, strict=True)
            }
            advance(sharers)  # the other ranks are about as far
        if sparse is not None:
            step = sharers * (len(group) - len(linears)) / (2 * sparse.num_experts)
            stacked = {info.stored_in: info for info in group if isinstance(info, ExpertLinear)}
            stacks, found = quantize_experts(
                sparse,
                experts if importances is None else ExpertImportances(plan, group, importances),
                {name: _grids(plan, info) for name, info in stacked.items()},
                settings.arguments(),
                storage_dtype,
                partial(advance, step),
            )
            candidates.update(stacks)
            statistics.update(found)
        # In host memory, so that the writer does not wait for the device's next work.
        moved = {name: {label: w.to("cpu") for label, w in each.items()} for name, each in candidates.items()}
        return partial(store.write_file, index, moved, statistics)

    on_their_way: dict[int, Future[dict[str, Any]]] = {}
    failures: list[Exception] = []

    def share(blocks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Make this rank's part of some blocks; returns entries of its earlier blocks, even if a new one fails."""
        made_before, entries = list(on_their_way), {}
        try:
            for index in blocks[ranks.index :: ranks.count]:
                on_their_way[index] = writer.submit(make(index, len(blocks)))
        except Exception as error:  # noqa: BLE001 - raised once all earlier blocks are in the store
            failures.append(error)
        for index in made_before:
            try:
                entries[index] = on_their_way[index].result()
            except Exception as error:  # noqa: BLE001 - likewise
                failures.append(error)
        return entries

    def fail() -> None:
        for other in failures[1:]:
            logger.warning(
                "Another error beside the one that ends the job: %s: %s", type(other).__name__, other
            )
        if failures:
            raise failures[0]

    with ThreadPoolExecutor(1, thread_name_prefix="rco-store") as writer:
        try:
            # The last round makes nothing; it enters the blocks of the round before.
            for start in range(0, len(missing) + ranks.count, ranks.count):
                together = missing[start : start + ranks.count]
                before = done
                for entries in ranks.gather(partial(share, together)):
                    for index, entry in entries.items():
                        store.enter(index, entry)
                        on_their_way.pop(index, None)
                ranks.gather(fail)
                done = before
                advance(sum(len(groups[index]) for index in together))
        finally:
            # After a failure or an interruption, keep the blocks that this rank has finished.
            for index, written in on_their_way.items():
                if written.exception() is None:
                    store.enter(index, written.result())


def _grids(plan: CompressionPlan, info: LinearInfo) -> dict[str, Format]:
    """Formats of a linear's packed options by label."""
    return {
        plan.label(option): plan.format_of(info, option) for option in plan.packed if plan.fits(info, option)
    }


def _shared_inputs(loaded: LoadedModel, group: Sequence[LinearInfo]) -> dict[str, str]:
    """Linear name -> path of the linear whose input statistic it uses (the first of its fused set)."""
    path_of = {info.name: info.path for info in group}
    source = {info.name: info.path for info in group}
    for names in loaded.layout.fused_sets(group):
        for name in names:
            source[name] = path_of[names[0]]
    return source


def _merged_peaks(loaded: LoadedModel, linears: Sequence[LinearInfo]) -> dict[str, float]:
    """Largest weight of every linear, and of all that engines merge with it."""
    peaks = {info.name: float(info.weight.detach().abs().max()) for info in linears}
    for names in loaded.layout.fused_sets(linears):
        peaks |= dict.fromkeys(names, max(peaks[name] for name in names))
    return peaks


def _outer_hessians(
    loaded: LoadedModel,
    tokens: Tensor,
    batch_size: int,
    linears: Sequence[LinearInfo],
    make_accumulator: type[AccumulatorT],
) -> dict[str, AccumulatorT]:
    """Statistics of the inputs of linears outside of the blocks, from whole passes."""
    found = {info.name: make_accumulator(info.in_features, device=info.weight.device) for info in linears}
    with linear_inputs(loaded.model, found, lambda name, x: found[name].add(x)):
        WholePasses(loaded.model, loaded.layout, tokens, batch_size).finish()
    return found


def _block_hessians(
    loaded: LoadedModel,
    inputs: BlockInputs | WholePasses,
    group: Sequence[LinearInfo],
    experts: ExpertHessians | None,
    make_accumulator: type[AccumulatorT],
) -> dict[str, AccumulatorT]:
    source = _shared_inputs(loaded, group)
    first = {info.path: info for info in group}
    accumulators = {
        path: make_accumulator(first[path].in_features, device=first[path].weight.device)
        for path in dict.fromkeys(source.values())
    }
    _, block = loaded.layout.blocks(loaded.model)[inputs.position]

    def add(path: str, x: Tensor) -> None:
        accumulators[path].add(x)

    with ExitStack() as stack:
        stack.enter_context(linear_inputs(block, accumulators, add))
        if experts is not None:
            stack.enter_context(watch_decisions(experts.layer, experts.add))
        inputs.advance()  # candidates use the full model's states, so this pass also yields the next block's inputs
    return {name: accumulators[path] for name, path in source.items()}


def _head_hessian(
    inputs: BlockInputs | WholePasses, ends: Sequence[LinearInfo], make_accumulator: type[AccumulatorT]
) -> dict[str, AccumulatorT]:
    """Statistics of the output layer's inputs, also for an embedding that shares its weight."""
    heads = [info for info in ends if info.role != EMBEDDING_ROLE or info.tied]
    if not heads:
        return {}
    accumulator = make_accumulator(heads[0].in_features, device=heads[0].weight.device)
    for rows in inputs.finish():
        accumulator.add(rows)
    return {info.name: accumulator for info in heads}


# ---------------------------------------------------------------------- importance matrices


def measure_importances(
    loaded: LoadedModel, plan: CompressionPlan, calibration: CalibrationSet, settings: CandidateSettings
) -> ImportanceMatrix:
    """Mean squared inputs of every linear of a GGUF plan, in the full model, by tensor of the file.

    Experts that few tokens visit are given further ones, as for GPTQ (:class:`ExpertHessians`).
    """
    target = plan.target
    assert target is not None
    inputs = block_inputs(
        loaded.model, loaded.layout, calibration.tokens, batch_size=settings.batch_size, storage="cpu"
    )
    means: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for group in blocks_of(plan):
        linears = [info for info in group if not isinstance(info, ExpertLinear)]
        sparse, block = expert_layer_of(group), group[0].block
        experts = None
        if sparse is not None:
            experts = ExpertHessians(sparse, calibration.tokens.numel(), settings.expert_tokens)
        target_block = len(loaded.layout.blocks(loaded.model)) if block is None else block
        while inputs.position < target_block:
            inputs.advance()
        found = (
            _head_hessian(inputs, group, InputSquares)
            if block is None
            else _block_hessians(loaded, inputs, linears, experts, InputSquares)
        )
        for name, accumulator in found.items():
            means[target.names[name]] = accumulator.matrix()[None].cpu()
            counts[target.names[name]] = torch.tensor([float(accumulator.tokens)])
        if experts is not None:
            seen = (experts.visits + experts.added).float().cpu()
            squares = {down: experts.matrices(down).diagonal(dim1=1, dim2=2) / 2 for down in (False, True)}
            for info in group:
                if isinstance(info, ExpertLinear) and info.expert == 0:
                    means[target.names[info.name]] = squares[info.projection == "down"].cpu()
                    counts[target.names[info.name]] = seen
    chunks, size = calibration.tokens.shape
    return ImportanceMatrix(means, counts, chunks, size, importance_source(loaded, calibration))


def read_importances(path: Path, plan: CompressionPlan) -> ImportanceMatrix:
    """An importance matrix from a file, checked against every tensor of a GGUF plan.

    Raises:
        ModelError: It cannot be read, or belongs to another model.
    """
    target = plan.target
    assert target is not None
    experts = {target.names[info.name]: info.layer.num_experts for info in plan.experts}
    found = ImportanceMatrix.read(path).shaped(experts)
    for info in plan.linears:
        if not isinstance(info, ExpertLinear) or info.expert == 0:
            tensor_importances(plan, found, info)
    return found


def importance_source(loaded: LoadedModel, calibration: CalibrationSet) -> str:
    """Name of the text of a measured importance matrix, by which it is recognised."""
    return f"rco calibration {calibration.fingerprint[:16]} of model {loaded.fingerprint[:16]}"


def tensor_importances(
    plan: CompressionPlan, importances: ImportanceMatrix, info: LinearInfo
) -> Tensor | None:
    """(matrices, columns) importances of a linear's tensor; None for embedding or output layer without any.

    Raises:
        ModelError: The importance matrix belongs to another model.
    """
    target = plan.target
    assert target is not None
    name = target.names[info.name]
    matrices = info.layer.num_experts if isinstance(info, ExpertLinear) else 1
    if info.block is None and name not in importances.means:
        return None  # llama.cpp measures neither
    return importances.of(name, matrices, info.in_features)


class ExpertImportances:
    """Importances of a layer's experts, in the place of :class:`ExpertHessians`."""

    def __init__(
        self, plan: CompressionPlan, group: Sequence[LinearInfo], importances: ImportanceMatrix
    ) -> None:
        first = {
            info.projection: info for info in group if isinstance(info, ExpertLinear) and info.expert == 0
        }
        self._means = {kind: tensor_importances(plan, importances, info) for kind, info in first.items()}
        count = next(iter(first.values())).layer.num_experts
        self.visits = torch.zeros(count, dtype=torch.int64)
        self.added = torch.zeros(count, dtype=torch.int64)

    def matrices(self, down: bool) -> Tensor:
        """(experts, in) importances of the down projections, or of gate and up."""
        found = next(means for kind, means in self._means.items() if (kind == "down") == down)
        assert found is not None
        return found


# ---------------------------------------------------------------------- experts


Options = dict[str, Stored]
Statistics = dict[str, dict[str, Any]]


def expert_layer_of(linears: Sequence[LinearInfo]) -> MoELayer | None:
    """The sparse layer of one block's linears; None without one."""
    return next((info.layer for info in linears if isinstance(info, ExpertLinear)), None)


def quantize_experts(
    layer: MoELayer,
    hessians: ExpertHessians | ExpertImportances | None,
    grids: Mapping[str, Mapping[str, Format]],
    settings: Mapping[str, Any],
    storage_dtype: torch.dtype,
    on_expert: Callable[[], None],
) -> tuple[dict[str, Options], dict[str, Statistics]]:
    """Quantize every expert of a layer on every grid.

    Args:
        layer: The layer.
        hessians: Input statistics of the layer; None: round to nearest.
        grids: State-dict name of a stacked tensor -> label -> grid.
        settings: Further fields of :class:`rco.formats.base.EncodeSettings`.
        storage_dtype: Type of the scales.
        on_expert: Called after each expert's stack.

    Returns:
        State-dict name of a stacked tensor -> label -> packed weight of all its rows, and statistics of the same
        shape with one number per expert: ``error``, ``relative_error``, ``tokens`` and ``added_tokens``.
    """
    candidates: dict[str, Options] = {}
    statistics: dict[str, Statistics] = {}
    for name, stack in zip(layer.architecture.stacks, original_stacks(layer), strict=True):
        key = f"{layer.experts_name}.{name}"
        matrices = None if hessians is None else hessians.matrices(down=name == "down_proj")
        parts: list[list[Stored]] = []
        errors, relative = [], []
        for expert in range(layer.num_experts):
            weight = stack[expert].reshape(-1, stack.shape[3]).float()
            hessian = None if matrices is None else matrices[expert]
            packed, error, share = quantize_matrix(
                weight, hessian, list(grids[key].values()), settings, storage_dtype
            )
            parts.append(packed)
            errors.append(error)
            relative.append(share)
            on_expert()
        candidates[key] = {
            label: stack_rows([packed[k] for packed in parts]) for k, label in enumerate(grids[key])
        }
        statistics[key] = {
            label: {
                "error": [error[k] for error in errors],
                "relative_error": [share[k] for share in relative],
                "tokens": None if hessians is None else hessians.visits.tolist(),
                "added_tokens": None if hessians is None else hessians.added.tolist(),
            }
            for k, label in enumerate(grids[key])
        }
    return candidates, statistics


def quantize_matrix(
    weight: Tensor,
    hessian: Tensor | None,
    grids: Sequence[Format],
    settings: Mapping[str, Any],
    storage_dtype: torch.dtype,
) -> tuple[list[Stored], list[float], list[float]]:
    """Candidates, errors and relative errors of one matrix on several grids."""
    found = encode_all(
        grids, weight, hessian, settings=EncodeSettings(storage_dtype=storage_dtype, **settings)
    )
    packed, errors, relative = zip(*found, strict=True)
    return list(packed), list(errors), list(relative)


def packed_candidate(packed: Mapping[str, Mapping[str, Stored]], info: LinearInfo, label: str) -> Stored:
    """One linear's candidate; an expert's is cut out of its layer's stack."""
    if not isinstance(info, ExpertLinear):
        return packed[info.name][label]
    parts = 1 if info.projection == "down" else len(info.layer.architecture.kinds) - 1
    start = (info.expert * parts + info.part) * info.out_features
    return packed[info.stored_in][label].rows(start, start + info.out_features)


def tuned_candidates(
    plan: CompressionPlan,
    packed: Mapping[str, Mapping[str, Stored]],
    choices: Mapping[str, Format],
    weights: Mapping[str, Stored],
) -> dict[str, dict[str, Stored]]:
    """Candidates with tuned weights in place of the chosen ones; stacks of experts are copied.

    Args:
        plan: Groups and options.
        packed: The untuned candidates.
        choices: Options by linear.
        weights: Tuned weights by linear, in the formats of their options.
    """
    found: dict[str, dict[str, Stored]] = {}
    for info in plan.linears:
        if info.name not in weights:
            continue
        name, label = candidate_name(info), plan.label(choices[info.name])
        before, new = packed[name][label], weights[info.name].to(packed[name][label].device)
        if not isinstance(info, ExpertLinear):
            found.setdefault(name, {})[label] = new
            continue
        if label not in found.setdefault(name, {}):
            found[name][label] = before.clone()
        place = packed_candidate(found, info, label)  # a view
        for part, tensor in place.tensors.items():
            tensor.copy_(new.tensors[part])
    return found


def replace_candidates(
    packed: Mapping[str, Mapping[str, Stored]], others: Mapping[str, Mapping[str, Stored]]
) -> dict[str, dict[str, Stored]]:
    """Candidates with some replaced by others."""
    return {name: {**options, **others.get(name, {})} for name, options in packed.items()}


def recorded(
    statistics: Callable[[str, str], dict[str, Any]], info: LinearInfo, label: str, key: str
) -> float:
    """A statistic of one linear. Gate and up are quantized as one matrix, whose value is reported for the gate."""
    if not isinstance(info, ExpertLinear):
        return float(statistics(info.name, label)[key])
    return 0.0 if info.part else float(statistics(info.stored_in, label)[key][info.expert])


def kept_experts(plan: CompressionPlan, choices: Mapping[str, Format]) -> dict[int, list[int]]:
    """Experts that stay, by sparse layer, for layers that lose some; ``choices`` are options by linear."""
    kept: dict[int, list[int]] = {}
    pruned: set[int] = set()
    for info in plan.experts:
        if info.projection != "down":
            continue
        if choices[info.name] == REMOVED:
            pruned.add(info.layer.index)
        else:
            kept.setdefault(info.layer.index, []).append(info.expert)
    return {layer: kept.get(layer, []) for layer in sorted(pruned)}
