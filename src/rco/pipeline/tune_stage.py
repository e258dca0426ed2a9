"""Tuning as a stage of a run: mode, tokens and text, an estimate, checkpoints, and the tuned weights on disk."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rco.atomic_files import as_json, differences
from rco.compression.compression import Compression
from rco.compression.memory import saved_bytes_per_token
from rco.compression.tuning import Mode, Tuned, TuningSettings, TuningText, moved_codes, tune
from rco.core.problem import Allocation
from rco.data.calibration import CalibrationSet, DataSplits, build_calibration
from rco.formats.base import Stored
from rco.losses import LOGITS_BYTES
from rco.models.moe.linears import model_linears
from rco.models.precision import computing_in
from rco.pipeline.configs import CompressConfig, QuantizeConfig, Tune
from rco.pipeline.estimate import forward_seconds
from rco.pipeline.planning import Planned
from rco.pipeline.progress import Progress
from rco.runs import RunDirectory, RunError, free_memory
from rco.store import CandidateStore

__all__ = ["TuningPlan", "is_tuned", "load_tuned", "plan_tuning", "tune_stage", "tuning_text"]

_GPU_TOKENS = 1 << 20
_SEARCH_SHARE = 0.5  # time of the tuning by default, as a share of that of the search, without a GPU
_STEP_PASSES = 3.3  # forward passes that a training step costs per sequence
_CODE_TOKENS = (
    1 << 17
)  # fewest for which `auto` trains codes: on little text their noise costs more than they gain
_COMPARED = 6  # allocations that a search compares on the selection text
_MOST_SEQUENCES = 1 << 12  # distinct sequences; their reference is in host memory
_FEWEST_STEPS = 32  # before a step takes more than one sequence
_MOST_PER_STEP = 8
_BETWEEN_STATES = 9  # time to the next checkpoint, as a multiple of what the last one took
_CALL_SECONDS = 20.0  # between calls to ranks that wait
_FOLDER = "tuned"
_LABEL = "tuned"


@dataclass(frozen=True)
class TuningPlan:
    """What a tuning will do, and what it is expected to take.

    Attributes:
        settings: Settings of the training.
        sequences: Distinct sequences.
        memory: Bytes on the model's device.
        seconds: Expected time.
    """

    settings: TuningSettings
    sequences: int
    memory: int
    seconds: float

    def __str__(self) -> str:
        settings = self.settings
        return (
            f"tuning ({settings.mode}) on {settings.tokens:,} tokens of {self.sequences} sequences: "
            f"memory about {self.memory / 2**30:.2f} GiB, time about {self.seconds / 60:.1f} minutes"
        )


def is_tuned(run: RunDirectory) -> bool:
    """Whether the run's result has tuned weights."""
    return bool(run.metrics.get("tuning", {}).get("improved"))


# ------------------------------------------------------------------------ what will be done


def plan_tuning(
    config: QuantizeConfig,
    compression: Compression,
    weights: dict[str, Stored],
    *,
    mode: Tune | None = None,
    tokens: int | None = None,
) -> TuningPlan | None:
    """Mode, tokens, and the expected memory and time; None if there is nothing to tune, or no memory for it.

    Args:
        config: Settings of the run.
        compression: The compression.
        weights: The chosen weights.
        mode: What is trained; None: as in ``config``.
        tokens: Tokens to train on; None: as in ``config``.

    Raises:
        ValueError: The requested mode needs more memory than is free.
    """
    asked = mode or config.tune
    if asked == "off" or not any(stored.format.tunable(stored, codes=False) for stored in weights.values()):
        return None
    loaded, length = compression.loaded, config.length
    total = tokens or config.tune_tokens or default_tokens(config, on_gpu=loaded.device.type != "cpu")
    sequences = max(1, total // length)
    per_step = max(1, min(_MOST_PER_STEP, sequences // _FEWEST_STEPS))
    settings = TuningSettings(
        tokens=max(total, length),
        batch_size=per_step,
        at_once=per_step if loaded.device.type != "cpu" else 1,
        top_k=config.top_k or None,
        checkpointing=config.checkpointing,
        graphs=config.graphs,
        half=loaded.device.type != "cpu",
        evaluations=max(1, min(10, sequences // config.selection)),
        seed=config.seed,
    )
    listed: tuple[Mode, ...] = (asked,) if asked != "auto" else ("full", "blocks", "scales")
    if asked == "auto" and total < _CODE_TOKENS:
        listed = ("scales",)
    free = _free(compression)
    for each in listed:
        one = dataclasses.replace(settings, mode=each)
        needed = tuning_memory(compression, weights, one, length)
        if asked == "auto" and free is not None and needed > free:
            continue
        if free is not None and needed > free:
            raise ValueError(
                f"`tune='{each}'` needs about {needed / 2**30:.1f} GiB more, but {free / 2**30:.1f} GiB are free: "
                "take `tune='blocks'` or `tune='scales'`, `checkpointing=True`, or `tune='auto'`, which takes what "
                "fits."
            )
        distinct = min(sequences, _MOST_SEQUENCES)
        passes = _STEP_PASSES * sequences + distinct + config.selection * (one.evaluations + 2)
        seconds = passes * forward_seconds(loaded, compression.compute_dtype, length)
        return TuningPlan(one, distinct, needed, seconds)
    return None


def default_tokens(config: QuantizeConfig, *, on_gpu: bool) -> int:
    """Tokens if none are requested; they depend on the settings alone, so that a run can be repeated anywhere."""
    if on_gpu:
        return _GPU_TOKENS
    searched = 3 * config.steps * config.samples * config.batch_size
    searched += config.selection * (_COMPARED + config.refine_passes)
    return max(1, round(_SEARCH_SHARE * searched / (_STEP_PASSES + 1))) * config.length


def tuning_memory(
    compression: Compression, weights: dict[str, Stored], settings: TuningSettings, length: int
) -> int:
    """Bytes on the model's device beside the model and the candidates."""
    dtype, loaded = compression.compute_dtype, compression.loaded
    exact = 2 if settings.half else 4
    # On a GPU the decoded weight takes the place of the original one, which is in host memory meanwhile.
    decoded = 0 if loaded.device.type == "cuda" else dtype.itemsize
    blocks = {info.name: info.block for info in model_linears(loaded.layout, loaded.model)}
    by_block: dict[int | None, int] = {}
    for name, stored in weights.items():
        count = stored.shape[0] * stored.shape[1]
        # Gradient, codes, offsets and two moments; none of them where only scales are trained.
        each = decoded + (dtype.itemsize + 1 + 3 * exact if settings.trains_codes(stored) else 0)
        block = blocks.get(name)
        by_block[block] = by_block.get(block, 0) + count * each
    linears = [info for info in compression.plan.linears]
    saved = saved_bytes_per_token(loaded, linears, dtype)
    saved *= length * settings.at_once
    of_block = saved / max(1, len(loaded.layout.blocks(loaded.model)))
    end_to_end = of_block if settings.checkpointing else saved
    if settings.mode != "blocks":
        return int(sum(by_block.values()) + end_to_end + 2 * LOGITS_BYTES)
    scales = decoded * sum(stored.shape[0] * stored.shape[1] for stored in weights.values())
    return int(max(max(by_block.values(), default=0) + of_block, scales + end_to_end) + 2 * LOGITS_BYTES)


def _free(compression: Compression) -> int | None:
    """Bytes that may be used on the model's device; None if unknown."""
    device = compression.loaded.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    told = free_memory() if device.type == "cpu" else None
    return None if told is None else int(0.9 * told)


def tuning_text(
    config: QuantizeConfig, tokenizer: Any, selection: CalibrationSet, sequences: int
) -> CalibrationSet:
    """Up to so many sequences of the calibration text, without those of the selection."""
    found = build_calibration(
        config.data,
        tokenizer,
        samples=sequences + len(selection),
        length=config.length,
        seed=config.seed,
        at_most=True,
    ).without(selection)
    return found.select(slice(0, sequences))


# ------------------------------------------------------------------------ the stage


def tune_stage(
    config: CompressConfig,
    planned: Planned,
    data: DataSplits,
    allocation: Allocation,
    run: RunDirectory,
    progress: Progress,
    *,
    mode: Tune | None = None,
    tokens: int | None = None,
    again: bool = False,
) -> Planned:
    """Tune the chosen weights, or read them from the run; the returned plan's compression has them.

    The plan is returned as it is if nothing is tuned or tuning did not improve the loss on the selection text. Of
    several ranks, rank 0 tunes and calls the task ``wait`` on the others.

    Args:
        config: Settings of the run.
        planned: Model and candidates.
        data: Text of the run; the selection decides whether the tuned weights are taken.
        allocation: The chosen allocation.
        run: The run, which gets the section ``tuning`` of its metrics and the tuned weights.
        progress: Receives the expectation and the steps.
        mode: As for :func:`plan_tuning`.
        tokens: As for :func:`plan_tuning`.
        again: Tune even if the run has been tuned before; the better of the two results stays.
    """
    compression = planned.compression
    if not isinstance(config, QuantizeConfig) or compression.plan.removes_only:
        return planned
    before = run.metrics.get("tuning")
    if before is not None and not again:
        return _with_tuned(planned, allocation, run)
    compressed, weights = compression.deployed(allocation)
    plan = plan_tuning(config, compression, weights, mode=mode, tokens=tokens)
    if plan is None:
        return planned
    text = tuning_text(config, planned.loaded.tokenizer, data.selection, plan.sequences)
    plan = dataclasses.replace(plan, sequences=len(text))
    progress.message(str(plan))
    states = _States(run, plan)
    with ExitStack() as stack:
        kl = compression.loss_kind == "kl"
        texts = [
            TuningText(each, compression.reference(each) if kl else None) for each in (text, data.selection)
        ]
        head = compression.full_head()
        stack.enter_context(computing_in(planned.loaded.model, compression.compute_dtype))
        if compressed is not planned.loaded:
            stack.enter_context(computing_in(compressed.model, compression.compute_dtype))
        found = tune(
            compressed,
            weights,
            dataclasses.replace(head, weight=head.weight.detach().to(compression.compute_dtype)),
            texts[0],
            texts[1],
            plan.settings,
            on_progress=_calling(planned, progress.stage("tuning")),
            on_checkpoint=states.save,
            resume=states.last,
        )
    if before is not None and before["after"] <= found.after:
        progress.message(
            f"the earlier tuning ({before['mode']}, {before['tokens']:,} tokens) is kept: {before['after']:.5g} on "
            f"the selection text, {found.after:.5g} now"
        )
    else:
        run.drop_metrics("tuning")
        if found.improved:
            _write(run, compression, allocation, found.weights)
        run.update_metrics({"tuning": _described(plan, found, weights)})
    run.clear_checkpoints()
    return _with_tuned(planned, allocation, run)


def _calling(planned: Planned, report: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Progress that also calls the waiting ranks now and then: they would give up a rank that stays silent."""
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        report(done, total)
        if time.monotonic() - last >= _CALL_SECONDS:
            planned.ranks.call("wait")
            last = time.monotonic()

    return told


class _States:
    """Checkpoints of a tuning in its run.

    Attributes:
        last: The newest one; None if there is none.

    Raises:
        RunError: The run has a state of a tuning with other settings.
    """

    def __init__(self, run: RunDirectory, plan: TuningPlan) -> None:
        self._run, self._number, self._due = run, 0, 0.0
        self._settings = as_json(dataclasses.asdict(plan.settings))
        self.last: dict[str, Any] | None = None
        found = run.load_checkpoint()
        if found is None or "tuning" not in found[1]:
            run.clear_checkpoints()  # of the search, if it was stopped before it removed them
            return
        self._number, state = found
        first = next(differences(state["tuning"], self._settings), None)
        if first is not None:
            raise RunError(
                f"{run.folder} holds the state of a tuning with other settings ({first}). Continue with those "
                f"settings, or delete {run.folder / 'checkpoints'} to start again."
            )
        self.last = state["state"]

    def save(self, make: Callable[[], dict[str, Any]]) -> None:
        """Write a state in place of the one before, unless that would take more than a tenth of the time."""
        began = time.monotonic()
        if began < self._due:
            return
        self._number += 1
        self._run.save_checkpoint(self._number, {"tuning": self._settings, "state": make()})
        ended = time.monotonic()
        self._due = ended + _BETWEEN_STATES * (ended - began)


def _described(plan: TuningPlan, found: Tuned, before: dict[str, Stored]) -> dict[str, Any]:
    settings = plan.settings
    return {
        "mode": settings.mode,
        "tokens": found.tokens,
        "sequences": plan.sequences,
        "batch_size": settings.batch_size,
        "code_rate": settings.code_rate,
        "scale_rate": settings.scale_rate,
        "before": found.before,
        "after": found.after,
        "improved": found.improved,
        "seconds": found.seconds,
        "expected_seconds": plan.seconds,
        "expected_bytes": plan.memory,
        "curve": found.curve,
        **moved_codes(before, found.weights),
    }


def _identity(compression: Compression, allocation: Allocation) -> dict[str, Any]:
    store = compression.store
    return {
        "candidates": None if store is None else store.fingerprint,
        "allocation": [int(choice) for choice in allocation],
    }


def _write(
    run: RunDirectory, compression: Compression, allocation: Allocation, weights: dict[str, Stored]
) -> None:
    folder = run.folder / _FOLDER
    if folder.exists():  # of an earlier tuning, or of one that was stopped while writing
        shutil.rmtree(folder)
    with CandidateStore.create_or_resume(folder, _identity(compression, allocation), 1) as store:
        store.write_block(0, {name: {_LABEL: stored} for name, stored in weights.items()})


def load_tuned(folder: Path, compression: Compression, allocation: Allocation) -> Compression:
    """The compression with the tuned weights in a run's folder.

    Raises:
        StoreError: They are missing, damaged or belong to another allocation.
    """
    store = CandidateStore.open(folder / _FOLDER, _identity(compression, allocation))
    store.verify()
    weights = {name: store.load(name, _LABEL) for name in store.linears}
    return compression.tuned(allocation, weights)


def _with_tuned(planned: Planned, allocation: Allocation, run: RunDirectory) -> Planned:
    if not is_tuned(run):
        return planned
    if not (run.folder / _FOLDER).is_dir():
        raise RunError(f"{run.folder} has lost its tuned weights: restore {_FOLDER}, or start another run.")
    return dataclasses.replace(planned, compression=load_tuned(run.folder, planned.compression, allocation))
