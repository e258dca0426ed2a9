"""Training of a chosen allocation's codes and scales on the loss of the search, without a byte more.

``full`` trains codes and scales of all weights end to end; ``blocks`` trains those of one block at a time on the
output of the block, then all scales end to end; ``scales`` trains the scales alone. Codes are rounded to their grid
and scales to their stored type in every step, so the trained model is the stored one, in the formats that it had
before. The selection text decides among the weights before tuning and those at regular intervals of it, so the
result is never worse there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rco.compression.cuda_graphs import Recording
from rco.compression.language_model_objective import Reference
from rco.compression.tunable_model import (
    MakeTunable,
    TunableModel,
    TunableWeight,
    format_tunable,
    tunable_model,
)
from rco.core.async_copy import send
from rco.core.sampling import generator
from rco.data.calibration import CalibrationSet
from rco.formats.base import AdamState, AdamStep, Stored
from rco.losses import Head, chunked_cross_entropy, chunked_kl
from rco.models.capture import BlockInputs
from rco.models.loading import LoadedModel
from rco.models.moe.linears import model_linears
from rco.models.switchable_model import checkpointed_blocks

__all__ = ["Mode", "Tuned", "TuningSettings", "TuningText", "moved_codes", "tune"]

logger = logging.getLogger(__name__)

Mode = Literal["scales", "blocks", "full"]
Weights = Mapping[str, Stored]
MakeState = Callable[[], dict[str, Any]]
Curve = list[dict[str, Any]]

_BETAS = (0.9, 0.99)
_EPSILON = 1e-12  # gradients of a KL with respect to single weights are far below one
_EAGER_STEPS = 2  # before a step is recorded as a CUDA graph
_SCALES_SHARE = 0.25  # tokens of the scales end to end after the blocks, as a share of the tokens of a block
_LOW_BITS = 13  # of a float32 that a float16 does not have


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """Settings of :func:`tune`.

    Attributes:
        mode: What is trained, and on what.
        tokens: Tokens of all steps together; in ``blocks`` for every block.
        batch_size: Sequences per step.
        at_once: Most sequences per forward and backward pass; a step sums the gradients of several passes.
        code_rate: Learning rate of codes, in steps of the grid.
        scale_rate: Learning rate of scales: change of a weight at the end of its grid, in steps of the grid.
        warmup: Share of the steps over which the rates rise from zero; they fall to zero by a cosine after it.
        code_bits: Widest format whose codes are trained; of wider ones only the scales.
        update: ``adam``, or ``sign`` for steps by the sign of the gradient.
        half: Keep offsets and moments in 16 bits; offsets are rounded up or down at random, without bias.
        evaluations: Measurements on the selection text, the last one at the end.
        patience: Stop after so many measurements in a row without an improvement, counted from the middle of the
            training on: the falling rate wins back what large steps lose.
        top_k: Coarsen the KL to the reference's k likeliest tokens; None: the full vocabulary.
        checkpointing: Recompute activations in the backward pass.
        graphs: On a GPU, replay steps as a CUDA graph.
        seed: Seed of the order of the text.
    """

    mode: Mode = "full"
    tokens: int = 1 << 19
    batch_size: int = 8
    at_once: int = 8
    code_rate: float = 0.0025
    scale_rate: float = 0.02
    warmup: float = 0.05
    code_bits: int = 8
    update: Literal["adam", "sign"] = "adam"
    half: bool = False
    evaluations: int = 10
    patience: int = 4
    top_k: int | None = None
    checkpointing: bool = False
    graphs: bool = True
    seed: int = 0

    def steps(self, length: int) -> int:
        """Number of steps on sequences of a length; at least one."""
        return max(1, self.tokens // (self.batch_size * length))

    def trains_codes(self, stored: Stored) -> bool:
        """Whether the codes of a weight are trained in this mode."""
        return self.mode != "scales" and stored.format.bits <= self.code_bits


@dataclass(frozen=True)
class TuningText:
    """Sequences, and the full model's hidden states on them; without these the loss is cross-entropy.

    Attributes:
        data: The sequences.
        reference: The hidden states.
    """

    data: CalibrationSet
    reference: Reference | None


@dataclass(frozen=True)
class Tuned:
    """Result of :func:`tune`.

    Attributes:
        weights: Stored weights by linear, in the formats of the given ones.
        before: Loss on the selection text before tuning.
        after: The same for the result.
        curve: Measurements: ``stage``, ``step``, ``tokens``, ``training`` (mean loss since the last one; None at
            the start) and ``selection``.
        tokens: Tokens that were trained on.
        seconds: Time of the training and of its measurements.
    """

    weights: dict[str, Stored]
    before: float
    after: float
    curve: Curve
    tokens: int
    seconds: float

    @property
    def improved(self) -> bool:
        """Whether the result differs from the given weights."""
        return self.after < self.before


def tune(
    compressed: LoadedModel,
    weights: Weights,
    full_head: Head,
    text: TuningText,
    selection: TuningText,
    settings: TuningSettings,
    *,
    make: MakeTunable = format_tunable,
    on_progress: Callable[[int, int], None] | None = None,
    on_checkpoint: Callable[[MakeState], None] | None = None,
    resume: Mapping[str, Any] | None = None,
) -> Tuned:
    """Train the stored weights of a compressed model.

    Args:
        compressed: The model whose linears ``weights`` names, with the original weights and without pruned experts,
            in the type to compute in. It is restored at the end.
        weights: Stored weights by linear, as :func:`rco.compression.deployment.deploy` returns them.
        full_head: The output layer with its original weight.
        text: Sequences to train on.
        selection: Other sequences, which decide among the results.
        settings: What is trained, and how.
        make: Makes the trainable form of a weight.
        on_progress: Called with (steps done, all steps).
        on_checkpoint: Called with a function that returns a state from which ``resume`` continues to the same
            result. It copies all trained parameters to host memory, and is valid during the call alone.
        resume: Such a state.
    """
    began = time.perf_counter()
    measured = _Measured(compressed, full_head, settings.top_k)
    state, steps = dict(resume or {}), settings.steps(text.data.length)
    with _checkpointed(compressed, settings.checkpointing):
        if settings.mode == "blocks":
            later = max(1, round(_SCALES_SHARE * steps))
            total = steps * len(compressed.layout.blocks(compressed.model)) + later
            before = float(state["before"]) if state else measured.stored(weights, selection)
            blocks = _Blocks(compressed, text.data, selection.data, settings, make, steps)

            def save(done: Mapping[str, MakeState]) -> None:
                if on_checkpoint is not None:
                    on_checkpoint(lambda: {"before": before, **{part: make() for part, make in done.items()}})

            report = _counted(on_progress, 0, total)
            tuned, curve = blocks.run(weights, state.get("blocks", {}), report, lambda s: save({"blocks": s}))
            finished = {"blocks": partial(blocks.state, tuned, curve, len(blocks))}
            ending = _EndToEnd(
                measured, text, selection, replace(settings, mode="scales"), format_tunable, later
            )
            found = ending.run(
                tuned,
                state.get("scales"),
                _counted(on_progress, total - later, total),
                lambda s: save({**finished, "scales": s}),
            )
            curve = curve + found.curve
        else:
            training = _EndToEnd(measured, text, selection, settings, make, steps)
            found = training.run(
                weights, state or None, _counted(on_progress, 0, steps), on_checkpoint or (lambda _: None)
            )
            before, curve = found.before, found.curve
    tokens = sum(entry["tokens"] for entry in _last_of_stages(curve))
    if not found.after < before:
        return Tuned(dict(weights), before, before, curve, tokens, time.perf_counter() - began)
    kept = {name: found.weights[name].to(stored.device) for name, stored in weights.items()}
    return Tuned(kept, before, found.after, curve, tokens, time.perf_counter() - began)


def moved_codes(before: Weights, after: Weights) -> dict[str, Any]:
    """Codes that differ between two sets of stored weights, of formats that have codes.

    Returns:
        ``codes`` (all), ``moved``, ``share``, and ``largest``, the largest change of a code.
    """
    total = moved = largest = 0
    for name, stored in before.items():
        mine, other = stored.codes(), after[name].codes()
        if mine is None or other is None or not mine.numel():
            continue
        difference = (other.cpu().int() - mine.cpu().int()).abs_()
        total += difference.numel()
        moved += int(difference.count_nonzero())
        largest = max(largest, int(difference.max()))
    return {"codes": total, "moved": moved, "share": moved / max(total, 1), "largest": largest}


def _last_of_stages(curve: Curve) -> list[dict[str, Any]]:
    """The last measurement of every stage; of blocks, which train on the same tokens each, of one block."""
    last = {
        "blocks" if str(entry["stage"]).startswith("block ") else entry["stage"]: entry for entry in curve
    }
    return list(last.values())


def _counted(
    on_progress: Callable[[int, int], None] | None, offset: int, total: int
) -> Callable[[int], None]:
    def report(done: int) -> None:
        if on_progress is not None:
            on_progress(min(offset + done, total), total)

    return report


@contextmanager
def _checkpointed(loaded: LoadedModel, wanted: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if wanted:
            blocks = [block for _, block in loaded.layout.blocks(loaded.model)]
            stack.enter_context(checkpointed_blocks(blocks))
        yield


# ------------------------------------------------------------------------ losses


class _Measured:
    """The loss of the compressed model on text.

    Args:
        loaded: The compressed model.
        full_head: The output layer with its original weight.
        top_k: Coarsening of the KL.
    """

    def __init__(self, loaded: LoadedModel, full_head: Head, top_k: int | None) -> None:
        self.loaded, self._full_head, self._top_k = loaded, full_head, top_k

    def sum(self, tokens: Tensor, reference: Tensor | None, mask: Tensor) -> Tensor:
        """Sum of the loss over counted predictions of (B, L) tokens on the device; the mask is in host memory."""
        loaded = self.loaded
        hidden = loaded.layout.final_hidden(loaded.model, tokens)[:, :-1]
        spec = loaded.layout.head(loaded.model)
        head = Head(spec.weight, spec.bias, spec.softcap, spec.scale)
        if reference is None:
            return chunked_cross_entropy(hidden, head, tokens[:, 1:], mask[:, :-1], reduction="sum")
        return chunked_kl(
            hidden,
            head,
            reference[:, :-1],
            self._full_head,
            mask[:, :-1],
            top_k=self._top_k,
            reduction="sum",
        )

    @torch.no_grad()
    def mean(self, text: TuningText, at_once: int = 4) -> float:
        """Mean loss per counted prediction of the present weights."""
        total, device = 0.0, self.loaded.device
        for start in range(0, len(text.data), at_once):
            rows = slice(start, start + at_once)
            mask = text.data.mask[rows]
            if mask[:, :-1].any():
                states = None if text.reference is None else text.reference.hidden[rows].to(device)
                total += float(self.sum(text.data.tokens[rows].to(device), states, mask))
        return total / max(text.data.num_predictions, 1)

    def stored(self, weights: Weights, text: TuningText) -> float:
        """Mean loss with stored weights."""
        with tunable_model(self.loaded, weights, codes=lambda _: False, blocks=()):
            return self.mean(text)


# ------------------------------------------------------------------------ steps


def rate_at(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate in a step: a linear rise, then a cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


class _Optimizer:
    """Adam, or steps by the sign of the gradient, over the parameters of a tunable model.

    Numbers that change from step to step are read from the device, so that a step can be recorded as a CUDA graph.
    """

    def __init__(self, model: TunableModel, settings: TuningSettings) -> None:
        self._model, self._settings = model, settings
        self._rates: dict[str, float] = {}
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._numbers: dict[torch.device, Tensor] = {}
        self._counts: dict[torch.device, Tensor] = {}
        for weight in model.weights:
            if not weight.trained:
                continue
            rates = weight.rates(settings.code_rate, settings.scale_rate)
            for name, parameter in weight.trained.items():
                key = f"{weight.names[0]}|{name}"
                self._rates[key] = rates[name]
                large = settings.half and parameter.numel() == weight.stored.shape[0] * weight.stored.shape[1]
                if large:
                    parameter.data = parameter.data.half()
                if settings.update == "adam":
                    kind = torch.bfloat16 if large else parameter.dtype
                    self._moments[key] = (
                        torch.zeros_like(parameter, dtype=kind),
                        torch.zeros_like(parameter, dtype=kind),
                    )
                if parameter.device not in self._numbers:
                    self._numbers[parameter.device] = torch.zeros(3, device=parameter.device)
                    self._counts[parameter.device] = torch.zeros(
                        (), dtype=torch.int64, device=parameter.device
                    )

    def prepare(self, step: int, share: float) -> None:
        """Set the numbers of a step, counted from 0, at a share of the learning rates."""
        first, second = (1 - beta ** (step + 1) for beta in _BETAS)
        numbers = torch.tensor([share / first, 1 / second, share])
        for device, there in self._numbers.items():
            there.copy_(send(numbers, device))
            self._counts[device].fill_(step)

    @torch.no_grad()
    def update(self) -> None:
        """Update the parameters from the gradients of the model's weights, and decode the weights."""
        for weight in self._model.weights:
            if not weight.trained:
                continue
            if self._settings.update == "adam" and weight.adam(*self._adam(weight)):
                continue
            for name, gradient in weight.gradients().items():
                parameter = weight.trained[name]
                self._change(f"{weight.names[0]}|{name}", parameter, gradient)
            weight.decode()

    def _adam(self, weight: TunableWeight) -> tuple[dict[str, AdamState], AdamStep]:
        """State and numbers of a step of Adam on one weight."""
        device = weight.parameter.device
        keys = {name: f"{weight.names[0]}|{name}" for name in weight.trained}
        state = {name: AdamState(self._moments[key], self._rates[key]) for name, key in keys.items()}
        return state, AdamStep(self._numbers[device], self._counts[device], _BETAS, _EPSILON)

    def _change(self, key: str, parameter: Tensor, gradient: Tensor) -> None:
        numbers, rate = self._numbers[parameter.device], self._rates[key]
        if self._settings.update == "sign":
            change = gradient.sign().to(torch.float32).mul_(rate * numbers[2])
        else:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            first, second = self._moments[key]
            gradient = gradient.to(wide)
            # In place, unless the moments are kept in fewer bits.
            mean = first.to(wide).lerp_(gradient, 1 - _BETAS[0])
            square = second.to(wide).mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            if first.dtype != wide:
                first.copy_(mean)
                second.copy_(square)
            size = (square * numbers[1]).sqrt_().add_(_EPSILON)
            change = (mean / size).mul_(rate * numbers[0])
        if parameter.dtype == torch.float16:
            parameter.copy_(_rounded_at_random(parameter.float() - change, self._counts[parameter.device]))
        else:
            parameter.sub_(change)

    def state(self) -> dict[str, Any]:
        """Moments by parameter."""
        return {key: [each.cpu().clone() for each in pair] for key, pair in self._moments.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        for key, pair in self._moments.items():
            for mine, saved in zip(pair, state[key], strict=True):
                mine.copy_(saved)


def _rounded_at_random(values: Tensor, step: Tensor) -> Tensor:
    """float32 values rounded to neighbours in float16, up or down with probabilities that keep the mean.

    The noise is a hash of position and step, so it needs no state and is the same on every device.
    """
    number = torch.arange(values.numel(), dtype=torch.int64, device=values.device).view(values.shape)
    number = (number * 0x9E3779B1 + (step + 1) * 0x85EBCA6B) & 0xFFFFFFFF
    number = ((number ^ (number >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    number = ((number ^ (number >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    noise = ((number ^ (number >> 15)) & ((1 << _LOW_BITS) - 1)).to(torch.int32)
    raised = values.contiguous().view(torch.int32) + noise
    return ((raised >> _LOW_BITS) << _LOW_BITS).view(torch.float32)


# ------------------------------------------------------------------------ end to end


@dataclass(frozen=True)
class _Found:
    weights: dict[str, Stored]
    before: float
    after: float
    curve: Curve


def _state(
    place: Mapping[str, Any], best: Weights, model: TunableModel, optimizer: _Optimizer
) -> dict[str, Any]:
    """State of a training, in host memory."""
    parameters = {key: each.detach().cpu().clone() for key, each in model.parameters().items()}
    return {**place, "best": tensors_of(best), "parameters": parameters, "moments": optimizer.state()}


class _EndToEnd:
    """Training of all weights together on the loss of the model."""

    def __init__(
        self,
        measured: _Measured,
        text: TuningText,
        selection: TuningText,
        settings: TuningSettings,
        make: MakeTunable,
        steps: int,
    ) -> None:
        self._measured, self._text, self._selection = measured, text, selection
        self._settings, self._make, self._steps = settings, make, steps
        self._loaded = measured.loaded
        self._recording: Recording | None = None
        whole = bool(text.data.mask[:, :-1].all()) and text.reference is not None
        self._recordable = settings.graphs and whole and Recording.possible(self._loaded.model)

    def run(
        self,
        weights: Weights,
        state: Mapping[str, Any] | None,
        report: Callable[[int], None],
        save: Callable[[MakeState], None],
    ) -> _Found:
        """Train from given weights or from a saved state."""
        settings, steps = self._settings, self._steps
        due = _measured_steps(steps, settings.evaluations)
        order = batches_of(len(self._text.data), settings.batch_size, steps, settings.seed)
        with tunable_model(self._loaded, weights, codes=settings.trains_codes, make=self._make) as model:
            optimizer = _Optimizer(model, settings)
            if state is None:
                before = after = self._measured.mean(self._selection)
                best, worse, start = dict(weights), 0, 0
                curve: Curve = [
                    {"stage": settings.mode, "step": 0, "tokens": 0, "training": None, "selection": before}
                ]
            else:
                before, after, worse, start = (state[key] for key in ("before", "after", "worse", "step"))
                best, curve = restored(weights, state["best"]), list(state["curve"])
                _load(model, state["parameters"])
                optimizer.load(state["moments"])
            report(start)
            model.train(True)
            losses: list[Tensor] = []
            for step in range(start, steps):
                if worse >= settings.patience:
                    break
                model.anneal(step / steps)
                optimizer.prepare(step, rate_at(step, steps, settings.warmup))
                losses.append(self._step(model, optimizer, order[step], step - start))
                report(step + 1)
                if step + 1 not in due:
                    continue
                model.train(False)
                now = self._measured.mean(self._selection)
                lowest = min((entry["selection"] for entry in curve if entry["step"]), default=math.inf)
                worse = worse + 1 if now >= lowest and 2 * step >= steps else 0
                if now < after:
                    best, after = on_host(model.stored()), now
                curve.append(
                    {
                        "stage": settings.mode,
                        "step": step + 1,
                        "tokens": (step + 1) * settings.batch_size * self._text.data.length,
                        "training": float(torch.stack(losses).double().mean()),
                        "selection": now,
                    }
                )
                losses.clear()
                place = {
                    "step": step + 1,
                    "before": before,
                    "after": after,
                    "worse": worse,
                    "curve": list(curve),
                }
                save(partial(_state, place, best, model, optimizer))
                model.train(True)
            self._recording = None
        return _Found(best, before, after, curve)

    def _step(self, model: TunableModel, optimizer: _Optimizer, rows: Tensor, done: int) -> Tensor:
        """One step on some sequences; returns its mean loss, on the device."""
        data, device = self._text.data, self._loaded.device
        mask = data.mask[rows]
        tokens = send(data.tokens[rows], device)
        reference = None
        if self._text.reference is not None:
            reference = send(self._text.reference.hidden[rows], device)

        def work(tokens: Tensor, reference: Tensor | None = None) -> tuple[Tensor, ...]:
            model.clear_gradients()
            total = tokens.new_zeros((), dtype=torch.float32)
            count = max(1, int(mask[:, :-1].sum()))
            size = self._settings.at_once
            for start in range(0, len(tokens), size):
                part = slice(start, start + size)
                if not mask[part, :-1].any():
                    continue
                states = None if reference is None else reference[part]
                loss = self._measured.sum(tokens[part], states, mask[part]) / count
                torch.autograd.backward(loss)
                total = total + loss.detach()
            optimizer.update()
            return (total,)

        if not self._recordable or done < _EAGER_STEPS:
            return work(tokens, reference)[0]
        assert reference is not None
        if self._recording is None:
            first: list[Tensor] = []

            def noted(tokens: Tensor, reference: Tensor) -> tuple[Tensor, ...]:
                found = work(tokens, reference)
                first.append(found[0])
                return found

            try:
                # The work runs once before it is recorded: that is this step.
                self._recording = Recording(noted, [tokens, reference])
            except RuntimeError as error:  # includes out of memory
                self._recordable = False
                logger.warning(
                    "A step of the tuning could not be recorded as a CUDA graph (%s); steps are launched kernel "
                    "by kernel.",
                    error,
                )
                if not first:
                    return work(tokens, reference)[0]
            return first[0].clone()
        return self._recording(tokens, reference)[0]


def _measured_steps(steps: int, evaluations: int) -> set[int]:
    """Numbers of the steps after which the selection text is measured: equally spaced, the last one included."""
    count = max(1, min(evaluations, steps))
    return {round((index + 1) * steps / count) for index in range(count)}


def batches_of(sequences: int, size: int, steps: int, seed: int) -> list[Tensor]:
    """Sequences of every step: all of them in a random order, then again in another one."""
    rows: list[int] = []
    turn = 0
    while len(rows) < steps * size:
        rows += generator(seed, turn).permutation(sequences).tolist()
        turn += 1
    return [torch.tensor(rows[step * size : (step + 1) * size]) for step in range(steps)]


def _load(model: TunableModel, saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for key, parameter in model.parameters().items():
            parameter.copy_(saved[key])
    model.decode()


def on_host(weights: Weights) -> dict[str, Stored]:
    """Copies of stored weights in host memory."""
    return {name: stored.to("cpu").clone() for name, stored in weights.items()}


def tensors_of(weights: Weights) -> dict[str, dict[str, Tensor]]:
    """The tensors of stored weights, for a checkpoint."""
    return {
        # Copies: parts may share the memory of one buffer, all of which would be saved with each.
        name: {part: tensor.cpu().clone() for part, tensor in stored.tensors.items()}
        for name, stored in weights.items()
    }


def restored(weights: Weights, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Stored]:
    """Stored weights from :func:`tensors_of`, in the formats of others."""
    return {name: weights[name].over(parts) for name, parts in saved.items()}


# ------------------------------------------------------------------------ block by block


class _Blocks:
    """Training of one block at a time, on the squared difference of its output from that of the full model's block.

    A block gets the outputs of the trained blocks before it. Selection sequences, which gradients never use, decide
    between a block's weights before and after its training.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        text: CalibrationSet,
        selection: CalibrationSet,
        settings: TuningSettings,
        make: MakeTunable,
        steps: int,
    ) -> None:
        self._loaded, self._settings, self._make, self._steps = loaded, settings, make, steps
        self._count, self._length = len(text), text.length
        self._size = max(size for size in range(1, settings.at_once + 1) if settings.batch_size % size == 0)
        # Whole batches of both, so that every pass has the shape that the arguments of blocks were captured for.
        padding = -len(selection) % self._size
        self._tokens = torch.cat([text.tokens, selection.tokens, selection.tokens[:1].expand(padding, -1)])
        self._held = range(len(text), len(text) + len(selection))
        self._block = {info.name: info.block for info in model_linears(loaded.layout, loaded.model)}

    def __len__(self) -> int:
        return len(self._loaded.layout.blocks(self._loaded.model))

    def state(self, weights: Weights, curve: Curve, done: int) -> dict[str, Any]:
        """State after some blocks: the weights of these."""
        finished = {name: stored for name, stored in weights.items() if self._block.get(name) in range(done)}
        return {"done": done, "weights": tensors_of(finished), "curve": list(curve)}

    def run(
        self,
        weights: Weights,
        state: Mapping[str, Any],
        report: Callable[[int], None],
        save: Callable[[MakeState], None],
    ) -> tuple[dict[str, Stored], Curve]:
        """Train block after block."""
        tuned, curve, done = dict(weights), [], 0
        if state:
            tuned |= restored(weights, state["weights"])
            curve, done = list(state["curve"]), int(state["done"])
        if done >= len(self):
            return tuned, curve
        teacher = self._capture()
        student = self._capture()
        for index in range(len(self)):
            teacher.advance()  # with the original weights
            codes = self._settings.trains_codes
            inside = [name for name in weights if self._block.get(name) == index]
            if index >= done:
                mine = {name: tuned[name] for name in inside}
                with tunable_model(self._loaded, mine, codes=codes, make=self._make) as model:
                    if model.parameters():
                        self._train(model, tuned, student, teacher.hidden, index, curve, report)
            with tunable_model(self._loaded, {name: tuned[name] for name in inside}, codes=codes, blocks=()):
                student.advance()
            if index < done:
                continue
            report((index + 1) * self._steps)
            save(partial(self.state, tuned, curve, index + 1))
        return tuned, curve

    def _capture(self) -> BlockInputs:
        loaded = self._loaded
        if not loaded.layout.tail.chained:
            raise ValueError(
                f"The blocks of {type(loaded.model).__name__} cannot be run one by one, as `tune='blocks'` does: "
                "use `tune='full'` or `tune='scales'`."
            )
        return BlockInputs.capture(
            loaded.model, loaded.layout, self._tokens, batch_size=self._size, storage="cpu"
        )

    def _train(
        self,
        model: TunableModel,
        tuned: dict[str, Stored],
        student: BlockInputs,
        target: Tensor,
        index: int,
        curve: Curve,
        report: Callable[[int], None],
    ) -> None:
        """Train the weights of a block; the better ones on the selection sequences are put into ``tuned``."""
        settings, steps = self._settings, self._steps
        mine = [weight for weight in model.weights if weight.trained]
        device = mine[0].parameter.device
        unit = float(target[self._held.start : self._held.stop].double().square().mean()) or 1.0
        before = best = self._difference(student, target, device) / unit
        order = batches_of(self._count, settings.batch_size, steps, settings.seed)
        optimizer = _Optimizer(model, settings)
        due = _measured_steps(steps, 2)
        model.train(True)
        for step in range(steps):
            model.anneal(step / steps)
            optimizer.prepare(step, rate_at(step, steps, settings.warmup))
            model.clear_gradients()
            for rows in torch.split(order[step], self._size):
                with torch.enable_grad():
                    found = student.output(student.hidden[rows].to(device))
                    wanted = target[rows].to(found)
                    share = len(rows) / (unit * len(order[step]))
                    torch.autograd.backward((found - wanted).square().mean() * share)
            optimizer.update()
            report(index * steps + step + 1)
            if step + 1 in due:
                model.train(False)
                now = self._difference(student, target, device) / unit
                if now < best:
                    best = now
                    for weight in mine:
                        tuned.update(on_host(weight.weights()))
                model.train(True)
        tokens = steps * settings.batch_size * self._length
        curve.append(
            {
                "stage": f"block {index}",
                "step": steps,
                "tokens": tokens,
                "training": None,
                "selection": best,
                "before": before,
            }
        )

    @torch.no_grad()
    def _difference(self, student: BlockInputs, target: Tensor, device: torch.device) -> float:
        """Mean squared difference of the block's output on the selection sequences."""
        total, count = 0.0, 0
        for start in range(self._held.start, self._held.stop, self._size):
            rows = slice(start, start + self._size)
            inside = min(self._size, self._held.stop - start)
            part = student.output(student.hidden[rows].to(device))[:inside]
            total += float((part - target[rows][:inside].to(part)).double().square().sum())
            count += part.numel()
        return total / max(count, 1)
