"""Loss of a search on a language model: KL to the full model, or cross-entropy, on calibration text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from rco.compression.cuda_graphs import Recording
from rco.core.async_copy import send
from rco.core.objective import Answer, Objective
from rco.data.calibration import CalibrationSet
from rco.losses import Head, chunk_length, chunked_cross_entropy, chunked_kl
from rco.models.loading import LoadedModel
from rco.models.moe.probes import ProbeBuffer, UsedBuffer

__all__ = ["Disturb", "LanguageModelObjective", "LossKind", "OptionErrors", "Reference", "SetGates"]

logger = logging.getLogger(__name__)

LossKind = Literal["kl", "cross-entropy"]


@dataclass(frozen=True)
class Reference:
    """Last hidden states of the full model on every sequence: tokens x hidden, never tokens x vocabulary."""

    hidden: Tensor  # (S, L, H) on the CPU (in pinned memory for a GPU), in the model's type

    @classmethod
    @torch.no_grad()
    def compute(cls, loaded: LoadedModel, calibration: CalibrationSet, batch_size: int) -> Reference:
        """Run the full model once over the sequences."""
        hidden: Tensor | None = None
        for start in range(0, len(calibration.tokens), batch_size):
            ids = calibration.tokens[start : start + batch_size].to(loaded.device)
            part = loaded.layout.final_hidden(loaded.model, ids)
            if hidden is None:
                shape = (*calibration.tokens.shape, part.shape[-1])
                hidden = torch.empty(shape, dtype=part.dtype, pin_memory=part.is_cuda)
            hidden[start : start + batch_size] = part.cpu()
        if hidden is None:
            raise ValueError("The reference needs at least one sequence.")
        return cls(hidden)


class OptionErrors(Protocol):
    """Errors of every option, known without running the model."""

    def option_errors(self) -> Tensor:
        """(N, K) relative squared errors of the weights."""
        ...

    def output_errors(self) -> Tensor:
        """(N, K) squared errors of the outputs."""
        ...


class SetGates(Protocol):
    """Applies gates to a model."""

    def __call__(self, gates: Tensor, values: Tensor | None = None, recorded: bool = False) -> None:
        """Let the model use the options that ``gates`` (N, K) pick.

        Args:
            gates: One-hot rows that may carry gradient.
            values: Copy of the gates in host memory, if they are on a device: choices are read from it, without
                synchronization.
            recorded: The kernels will be replayed with other gates, so choices are read from the gates on the
                device. Only if :class:`LanguageModelObjective` has a ``check_recorded``.
        """
        ...


class GradientScores(Protocol):
    """Tables of scores that a backward pass inside their context fills."""

    def output_scores(self) -> AbstractContextManager[Tensor]:
        """(N, K), see :meth:`rco.core.objective.Objective.output_scores`."""
        ...

    def delta_losses(self) -> AbstractContextManager[Tensor]:
        """(N,), see :meth:`rco.core.objective.Objective.delta_losses`."""
        ...


class Disturb(Protocol):
    """Adds noise to the weights of one group, inside a context."""

    def __call__(self, group: int, squared_error: float, seed: int) -> AbstractContextManager[None]:
        """Noise whose square is ``squared_error`` times that of the weights under the present gates."""
        ...


@dataclass(frozen=True)
class _Text:
    """A batch of sequences: the model's inputs on its device, targets and mask in host memory."""

    tokens: Tensor  # (B, L) on the model's device
    reference: Tensor | None  # (B, L, H) on the model's device
    following: Tensor  # (B, L - 1) the tokens to be predicted
    mask: Tensor  # (B, L - 1) predictions that count, read without synchronization


class LanguageModelObjective(Objective):
    """Mean loss per predicted token of a model whose options are set by gates.

    Args:
        loaded: The model, already switchable.
        calibration: Sequences for the gradients.
        reference: The full model's hidden states on them; None for cross-entropy.
        reference_head: The full model's output layer.
        set_gates: Applies gates (N, K) to the model.
        student_head: The output layer under the present gates.
        batch_size: Sequences per batch.
        top_k: Coarsen the KL to the reference's k likeliest tokens and one bucket for the rest.
        selection: The same on the held-back sequences.
        curvature: (N, K, K) second-order cost of a switch, if known.
        errors: Computes tables of errors that some methods need; None: there are none.
        probe_buffer: Buffer of the model's backward pass, of a size estimated in advance; None: no buffer.
        disturb: Adds noise to one group's weights inside its context; None: not supported.
        group_blocks: Block of the model that every group is in; None: some group is in none.
        check_recorded: Raises for gates (N, K), in host memory, that cannot be set. Given if samples may be
            recorded as a CUDA graph, which is replayed without any check of the gates; None: no recording.

        scores: Tables that backward passes fill, for methods that score options by gradients; None: there are none.

    Attributes:
        probe_buffer: The argument.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: CalibrationSet,
        reference: Reference | None,
        reference_head: Head,
        set_gates: SetGates,
        student_head: Callable[[], Head],
        *,
        batch_size: int = 1,
        top_k: int | None = None,
        selection: LanguageModelObjective | None = None,
        curvature: Tensor | None = None,
        errors: OptionErrors | None = None,
        probe_buffer: ProbeBuffer | None = None,
        disturb: Disturb | None = None,
        group_blocks: Sequence[int] | None = None,
        check_recorded: Callable[[Tensor], None] | None = None,
        scores: GradientScores | None = None,
    ) -> None:
        self._loaded = loaded
        self._calibration = calibration
        self._reference = reference
        self._set_gates = set_gates
        self._student_head = student_head
        self._batch_size = batch_size
        self._top_k = top_k
        self._reference_head = reference_head
        self.num_batches = -(-len(calibration.tokens) // batch_size)
        self.selection = selection
        self.curvature = curvature
        self._errors = errors
        self.probe_buffer = probe_buffer
        self._disturb = disturb
        self._scores = scores
        if group_blocks is not None:
            self.group_blocks = list(group_blocks)
        # Only if every token counts, as in plain text: otherwise the number of predictions differs by sequence.
        whole = bool(calibration.mask[:, :-1].all()) and reference is not None
        self._check_recorded = check_recorded if whole else None
        self._recording: tuple[Recording, UsedBuffer | None] | None = None
        self._answered = False
        self.tokens_per_batch = batch_size * calibration.tokens.shape[1]

    @property
    def recordable(self) -> bool:
        """Whether the next sample may be recorded, or replayed from a recording."""
        return self._check_recorded is not None

    @property
    def recorded(self) -> bool:
        """Whether a recording of a sample is held."""
        return self._recording is not None

    @property
    def samples_redone(self) -> int:
        """Samples that were repeated because their buffer was too small."""
        return 0 if self.probe_buffer is None else self.probe_buffer.too_small

    @cached_property
    def option_errors(self) -> Tensor:
        """(N, K) squared error of every option's weights relative to the squared full weights."""
        return self._known_errors().option_errors()

    @cached_property
    def output_errors(self) -> Tensor:
        """(N, K) squared error of every option's outputs on the calibration text."""
        return self._known_errors().output_errors()

    def _known_errors(self) -> OptionErrors:
        if self._errors is None:
            raise AttributeError("This objective was made without tables of errors.")
        return self._errors

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """Loss on one batch of sequences; differentiable in the gates."""
        return self._loss(gates, None, batch)

    def noisy_loss(self, gates: Tensor, batch: int, group: int, squared_error: float, seed: int) -> Tensor:
        """Loss on one batch with noise of a relative squared error on the weights of one group."""
        if self._disturb is None:
            raise ValueError("This objective has no groups to whose weights noise can be added; use higgs.")
        self._set_gates(gates)
        with self._disturb(group, squared_error, seed):
            return self._loss(gates, None, batch)

    @torch.no_grad()
    def acceptance(self, gates: Tensor, batch: int) -> Tensor:
        """Expected acceptance: mean overlap ``sum_v min(p_v, q_v)`` of the compressed and the full model.

        It is the probability with which speculative decoding keeps a drafted token.
        """
        text = self._text(batch)
        if text.reference is None:
            raise ValueError("Acceptance needs the full model's predictions; use `loss='kl'`.")
        mask = text.mask.to(self._loaded.device)
        self._set_gates(gates)
        hidden = self._loaded.layout.final_hidden(self._loaded.model, text.tokens)[:, :-1][mask]
        reference = text.reference[:, :-1][mask]
        head, full = self._student_head(), self._reference_head
        size = chunk_length(head.vocabulary)
        overlap = hidden.new_zeros((), dtype=torch.float64)
        for mine, theirs in zip(torch.split(hidden, size), torch.split(reference, size), strict=True):
            overlap += torch.minimum(head.probabilities(mine), full.probabilities(theirs)).double().sum()
        return overlap / max(len(hidden), 1)

    def output_scores(self, gates: Tensor, batch: int) -> Answer:
        """Cross-entropy, and scores (N, K) of options from gradients at the outputs of linears."""
        return self._scored(self._known_scores().output_scores(), gates, batch)

    def delta_losses(self, gates: Tensor, batch: int) -> Answer:
        """Cross-entropy, and scores (N,) of the present options from gradients at weights and inputs of linears."""
        return self._scored(self._known_scores().delta_losses(), gates, batch)

    def _known_scores(self) -> GradientScores:
        if self._scores is None:
            raise ValueError("This objective was made without scores of options.")
        return self._scores

    def _scored(self, measured: AbstractContextManager[Tensor], gates: Tensor, batch: int) -> Answer:
        """Cross-entropy on one batch, and the table that its backward pass fills."""
        text = self._text(batch)
        leaf = self._placed(gates.detach()).requires_grad_()
        with measured as table:
            self._set_gates(leaf, gates.detach())
            hidden = self._loaded.layout.final_hidden(self._loaded.model, text.tokens)[:, :-1]
            loss = chunked_cross_entropy(hidden, self._student_head(), text.following, text.mask)
            torch.autograd.grad(loss, leaf)
        return float(loss.detach()), table

    def enqueue(self, gates: Tensor, batch: int) -> Callable[[], tuple[float, Tensor]]:
        """Launch the loss on one batch and its gradient; the returned function waits for them.

        The gates go to the model's device and their gradient stays there, so there is no synchronization within or
        between samples. Only the loss and the gradient of a sample are kept.
        """
        values, probe_buffer = gates.detach(), self.probe_buffer
        placed, text = self._placed(values), self._text(batch)
        found = self._replay(placed, values, text) or self._launch(placed, values, text)

        def answer() -> tuple[float, Tensor]:
            loss, gradient, used = found
            if probe_buffer is not None and used is not None and not probe_buffer.settle(used):
                self.forget_recording()  # its buffer is as small as this sample's
                again = self._placed(values), values, self._text(batch)
                loss, gradient, _ = self._launch(*again, counted=True)
            self._answered = True
            return float(loss), gradient.to(device=values.device, dtype=values.dtype)

        return answer

    def forget_recording(self) -> None:
        """Free the memory of a recorded sample; the next sample is recorded again."""
        self._recording = None

    def _placed(self, values: Tensor) -> Tensor:
        """Gates on the model's device."""
        # Not every device has the gates' float64.
        return send(values.float() if self._loaded.device.type == "mps" else values, self._loaded.device)

    def _launch(
        self, gates: Tensor, values: Tensor, text: _Text, *, recorded: bool = False, counted: bool = False
    ) -> tuple[Tensor, Tensor, UsedBuffer | None]:
        """A sample's loss, its gradient in the gates, and the part of the buffer that it used.

        With ``counted`` the buffer has exactly the needed size, at the price of one synchronization per layer.
        """
        leaf, probe_buffer = gates.detach().requires_grad_(), self.probe_buffer
        with nullcontext() if probe_buffer is None or counted else probe_buffer.sample(recorded) as used:
            loss = self._loss_on(leaf, values, text, recorded)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient, used

    def _replay(
        self, gates: Tensor, values: Tensor, text: _Text
    ) -> tuple[Tensor, Tensor, UsedBuffer | None] | None:
        """The same from a recording, or None; recorded once a sample has shown the needed size of the buffer."""
        if self._check_recorded is None or text.reference is None:
            return None
        if self.probe_buffer is not None and not self._answered:
            return None
        if self._recording is None:
            if len(text.tokens) < min(self._batch_size, len(self._calibration.tokens)):
                return None  # only the last batch is this short, so a recording would not be reused
            self._recording = self._record(gates, values, text)
            if self._recording is None:
                return None
        recording, used = self._recording
        if not recording.takes(gates, text.tokens, text.reference):
            return None
        self._check_recorded(values)
        loss, gradient, *counts = recording(gates, text.tokens, text.reference)
        return loss, gradient, used.replayed(*counts) if used is not None and counts else None

    def _record(
        self, gates: Tensor, values: Tensor, text: _Text
    ) -> tuple[Recording, UsedBuffer | None] | None:
        used: UsedBuffer | None = None

        def work(gates: Tensor, tokens: Tensor, reference: Tensor) -> tuple[Tensor, ...]:
            nonlocal used
            here = replace(text, tokens=tokens, reference=reference)
            loss, gradient, used = self._launch(gates, values, here, recorded=True)
            return (loss, gradient) if used is None or not used.needed else (loss, gradient, used.counts())

        assert text.reference is not None
        try:
            return Recording(work, [gates, text.tokens, text.reference]), used
        except RuntimeError as error:  # includes out of memory
            self._check_recorded = None
            logger.warning(
                "A sample could not be recorded as a CUDA graph (%s); samples are launched kernel by kernel.",
                error,
            )
            return None

    def _text(self, batch: int) -> _Text:
        if not 0 <= batch < self.num_batches:
            raise IndexError(f"There are {self.num_batches} batches, got number {batch}.")
        rows = slice(batch * self._batch_size, (batch + 1) * self._batch_size)
        device, ids = self._loaded.device, self._calibration.tokens[rows]
        tokens = send(ids, device)
        reference = None
        if self._reference is not None:
            # Fetched before the forward pass, so that the copy overlaps with it; whole sequences, which are
            # contiguous in pinned memory.
            reference = send(self._reference.hidden[rows], device)
        return _Text(tokens, reference, ids[:, 1:], self._calibration.mask[rows, :-1])

    def _loss(self, gates: Tensor, values: Tensor | None, batch: int) -> Tensor:
        return self._loss_on(gates, values, self._text(batch))

    def _loss_on(self, gates: Tensor, values: Tensor | None, text: _Text, recorded: bool = False) -> Tensor:
        self._set_gates(gates, values, recorded)
        hidden = self._loaded.layout.final_hidden(self._loaded.model, text.tokens)[:, :-1]
        head = self._student_head()
        if text.reference is None:
            return chunked_cross_entropy(hidden, head, text.following, text.mask)
        reference = text.reference[:, :-1]
        return chunked_kl(hidden, head, reference, self._reference_head, text.mask, top_k=self._top_k)
