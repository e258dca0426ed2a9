"""Losses over a large vocabulary, computed from hidden states in chunks of tokens.

Logits are tokens x vocabulary; for a modern model that is far more memory than the model's activations.
Here they exist only for one chunk of tokens at a time: the loss *and* its gradient with respect to the hidden
states (and to the output layer, if required) are computed while a chunk's logits are in memory, so
that the backward pass only scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rco.core.async_copy import send
from rco.losses.head import (
    LOGITS_BYTES,
    Head,
    accumulate_outer,
    chunk_length,
    describe,
    multiply,
    project,
)

__all__ = [
    "chunked_cross_entropy",
    "chunked_kl",
    "token_cross_entropy",
    "token_kl",
    "token_kl_and_cross_entropy",
]

Reduction = Literal["mean", "sum"]


def chunked_kl(
    student_hidden: Tensor,
    student_head: Head,
    reference_hidden: Tensor,
    reference_head: Head,
    mask: Tensor | None = None,
    chunk_tokens: int | None = None,
    top_k: int | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """KL(reference || student), averaged over the counted tokens.

    Differentiable with respect to the student's hidden states and head; the reference is a constant and may
    be on another device (it is copied chunk by chunk).

    Args:
        student_hidden: (tokens, hidden), or any leading shape.
        student_head: Output layer of the student.
        reference_hidden: Same leading shape as the student's.
        reference_head: Output layer of the reference, over the same vocabulary.
        mask: Leading shape of the hidden states, boolean or integer; only non-zero positions count.
        chunk_tokens: Tokens per chunk; None takes as many as :data:`LOGITS_BYTES` allows.
        top_k: Compare the reference's k likeliest tokens and one bucket of all the others. This is the KL of
            the coarsened distributions: never above the full one, zero where they agree.
        reduction: "mean" over counted tokens, or "sum".

    Raises:
        ValueError: On mismatched shapes, or if the mask leaves no token.
    """
    job, hidden = _kl_job(
        student_hidden, student_head, reference_hidden, reference_head, mask, chunk_tokens, top_k
    )
    return _reduce(job, hidden, student_head, reduction)


def token_kl(
    student_hidden: Tensor,
    student_head: Head,
    reference_hidden: Tensor,
    reference_head: Head,
    mask: Tensor | None = None,
    chunk_tokens: int | None = None,
    top_k: int | None = None,
) -> Tensor:
    """KL of every counted token, in order, without gradient; arguments as in :func:`chunked_kl`."""
    job, hidden = _kl_job(
        student_hidden, student_head, reference_hidden, reference_head, mask, chunk_tokens, top_k
    )
    return _token_values(job, hidden, student_head)


def token_kl_and_cross_entropy(
    student_hidden: Tensor,
    student_head: Head,
    reference_hidden: Tensor,
    reference_head: Head,
    targets: Tensor,
    mask: Tensor | None = None,
    chunk_tokens: int | None = None,
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`token_kl` and :func:`token_cross_entropy` from one projection of the student's hidden states."""
    job, hidden = _kl_job(
        student_hidden, student_head, reference_hidden, reference_head, mask, chunk_tokens, top_k
    )
    _check_targets(targets, student_hidden, student_head, mask)
    likelihood = _NegativeLogLikelihood(send(targets.reshape(-1), hidden.device), job.workspace)
    found: list[Tensor] = []

    def both(logits: Tensor, chunk: _Chunk, gradient: bool) -> tuple[Tensor, Tensor | None]:
        found.append(likelihood(logits, chunk, False)[0])
        return job.criterion(logits, chunk, gradient)

    divergence = _token_values(replace(job, criterion=both), hidden, student_head)
    return divergence, torch.cat(found)


def chunked_cross_entropy(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    mask: Tensor | None = None,
    chunk_tokens: int | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Negative log-likelihood of ``targets``, averaged over the counted tokens (or summed).

    ``targets`` has the leading shape of ``hidden`` and is already aligned with it: position t holds the token
    that hidden state t predicts. Targets of masked-out positions are ignored. Targets are checked on their own
    device: with targets and mask in host memory, the host does not wait for the GPU.
    """
    job, flat = _cross_entropy_job(hidden, head, targets, mask, chunk_tokens)
    return _reduce(job, flat, head, reduction)


def token_cross_entropy(
    hidden: Tensor, head: Head, targets: Tensor, mask: Tensor | None = None, chunk_tokens: int | None = None
) -> Tensor:
    """Negative log-likelihood of every counted token, in order; no gradient."""
    job, flat = _cross_entropy_job(hidden, head, targets, mask, chunk_tokens)
    return _token_values(job, flat, head)


# --- One pass over the chunks ---


class _Criterion(Protocol):
    """Per-token losses of one chunk, and their gradient with respect to the chunk's logits."""

    def __call__(self, logits: Tensor, chunk: _Chunk, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Leave ``logits`` as they are; the gradient may share a buffer with the next call's."""
        ...


@dataclass(frozen=True)
class _Chunk:
    """Counted tokens ``start:stop``; ``index`` holds their positions (None: every position counts)."""

    start: int
    stop: int
    index: Tensor | None

    def take(self, tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """This chunk's rows of a tensor with one row per position."""
        if self.index is None:
            rows = tensor[self.start : self.stop]
        else:
            rows = tensor.index_select(0, self.index[self.start : self.stop].to(tensor.device))
        return rows.to(device=device, dtype=dtype)


class _Workspace:
    """Named (chunk, vocabulary) buffers, allocated once per pass."""

    def __init__(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self.dtype, self.device = (rows, vocabulary), dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._shape, dtype=self.dtype, device=self.device)
        return self._buffers[name][:rows]


@dataclass(frozen=True)
class _Job:
    """Inputs of a pass except the tensors that autograd tracks."""

    criterion: _Criterion
    workspace: _Workspace
    index: Tensor | None
    count: int
    chunk_tokens: int

    def chunks(self) -> Iterator[_Chunk]:
        for start in range(0, self.count, self.chunk_tokens):
            yield _Chunk(start, min(start + self.chunk_tokens, self.count), self.index)


def _reduce(job: _Job, hidden: Tensor, head: Head, reduction: Reduction) -> Tensor:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}.")
    factor = 1.0 / job.count if reduction == "mean" else 1.0
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        loss: Tensor = _ChunkedLoss.apply(hidden, head.weight, head.bias, head, job, factor)  # type: ignore[no-untyped-call]
        return loss
    return _token_values(job, hidden, head).sum() * factor


@torch.no_grad()
def _token_values(job: _Job, hidden: Tensor, head: Head) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        values = []
        for chunk in job.chunks():
            logits = job.workspace("logits", chunk.stop - chunk.start)
            project(chunk.take(hidden, hidden.device), head, logits)
            values.append(job.criterion(logits, chunk, False)[0])
        return torch.cat(values)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of a criterion times ``factor``; its gradients are formed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, job: _Job, factor: float
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = job.workspace.dtype
        # float16 has too little range for a gradient divided by the number of tokens; bfloat16 has float32's.
        kept = wide if hidden.dtype == torch.float16 else hidden.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=kept) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        values = []
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in job.chunks():
                rows = chunk.take(hidden, hidden.device)
                logits = job.workspace("logits", len(rows))
                project(rows, head, logits)
                value, slope = job.criterion(logits, chunk, True)
                assert slope is not None
                values.append(value)
                slope.mul_(head.scale)
                if head.softcap is not None:  # d cap(z) / dz = 1 - (cap(z) / softcap)^2
                    slope.addcmul_(slope, logits.div_(head.softcap).square_(), value=-1)
                if grad_hidden is not None:
                    grad_rows = multiply(slope, weight).mul_(factor).to(kept)
                    if chunk.index is None:
                        grad_hidden[chunk.start : chunk.stop] = grad_rows
                    else:
                        grad_hidden.index_copy_(0, chunk.index[chunk.start : chunk.stop], grad_rows)
                if grad_weight is not None:
                    accumulate_outer(grad_weight, slope, rows, factor)
                if grad_bias is not None:
                    grad_bias.add_(slope.sum(0), alpha=factor)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return torch.cat(values).sum() * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None)


# --- Criteria ---


@dataclass(frozen=True)
class _Divergence:
    """KL of the reference's next-token distribution from the student's."""

    hidden: Tensor
    head: Head
    workspace: _Workspace
    top_k: int | None

    def __call__(self, logits: Tensor, chunk: _Chunk, gradient: bool) -> tuple[Tensor, Tensor | None]:
        rows = len(logits)
        spare = self.workspace("probabilities", rows)
        project(chunk.take(self.hidden, logits.device), self.head, spare)
        reference = torch.log_softmax(spare, 1, out=self.workspace("reference", rows))
        student = torch.log_softmax(logits, 1, out=self.workspace("student", rows))
        if self.top_k is not None and self.top_k < logits.shape[1]:
            return self._coarse(reference, student, spare, self.top_k, gradient)
        probabilities = torch.exp(reference, out=spare)
        values = reference.sub_(student).mul_(probabilities).sum(1)
        return values, student.exp_().sub_(probabilities) if gradient else None

    @staticmethod
    def _coarse(
        reference: Tensor, student: Tensor, spare: Tensor, top_k: int, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        top = reference.topk(top_k, dim=1).indices
        reference_top, student_top = reference.gather(1, top), student.gather(1, top)
        # The tail's mass is summed from its own terms: one minus the top's mass would lose all digits.
        reference_tail = reference.scatter_(1, top, -torch.inf).logsumexp(1, keepdim=True)
        student_tail = student.scatter_(1, top, -torch.inf).logsumexp(1, keepdim=True)
        values = (reference_top.exp() * (reference_top - student_top)).sum(1)
        values += (reference_tail.exp() * (reference_tail - student_tail)).squeeze(1)
        if not gradient:
            return values, None
        # In the tail the target is the reference's tail mass, spread as the student spreads its own.
        target = torch.add(student, reference_tail - student_tail, out=spare).exp_()
        slope = student.exp_().sub_(target)
        return values, slope.scatter_(1, top, student_top.exp() - reference_top.exp())


@dataclass(frozen=True)
class _NegativeLogLikelihood:
    """Minus the log-probability of a given token."""

    targets: Tensor
    workspace: _Workspace

    def __call__(self, logits: Tensor, chunk: _Chunk, gradient: bool) -> tuple[Tensor, Tensor | None]:
        targets = chunk.take(self.targets, logits.device).unsqueeze(1)
        scores = torch.log_softmax(logits, 1, out=self.workspace("student", len(logits)))
        values = -scores.gather(1, targets).squeeze(1)
        if not gradient:
            return values, None
        minus_one = torch.full_like(targets, -1, dtype=scores.dtype)
        return values, scores.exp_().scatter_add_(1, targets, minus_one)


# --- Checks of the arguments ---


def _kl_job(
    student_hidden: Tensor,
    student_head: Head,
    reference_hidden: Tensor,
    reference_head: Head,
    mask: Tensor | None,
    chunk_tokens: int | None,
    top_k: int | None,
) -> tuple[_Job, Tensor]:
    student = _at_head(_flatten(student_hidden, student_head), student_head)
    reference = _flatten(reference_hidden, reference_head)
    if student_hidden.shape[:-1] != reference_hidden.shape[:-1]:
        raise ValueError(
            "Student and reference must cover the same tokens, got hidden states of shapes "
            f"{tuple(student_hidden.shape)} and {tuple(reference_hidden.shape)}."
        )
    if student_head.vocabulary != reference_head.vocabulary:
        raise ValueError(
            "Student and reference must share one vocabulary, got heads of "
            f"{student_head.vocabulary} and {reference_head.vocabulary} tokens."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for the full vocabulary; got {top_k}.")
    dtype = _wide(student, student_head.weight, reference, reference_head.weight)
    index, count = _counted(mask, student_hidden)
    chunk_tokens, workspace = _prepare(student, student_head, dtype, count, chunk_tokens)
    criterion = _Divergence(reference.detach(), reference_head, workspace, top_k)
    return _Job(criterion, workspace, index, count, chunk_tokens), student


def _cross_entropy_job(
    hidden: Tensor, head: Head, targets: Tensor, mask: Tensor | None, chunk_tokens: int | None
) -> tuple[_Job, Tensor]:
    flat = _at_head(_flatten(hidden, head), head)
    index, count = _counted(mask, hidden)
    _check_targets(targets, hidden, head, mask)
    chunk_tokens, workspace = _prepare(flat, head, _wide(flat, head.weight), count, chunk_tokens)
    criterion = _NegativeLogLikelihood(send(targets.reshape(-1), flat.device), workspace)
    return _Job(criterion, workspace, index, count, chunk_tokens), flat


def _check_targets(targets: Tensor, hidden: Tensor, head: Head, mask: Tensor | None) -> None:
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of shape {tuple(hidden.shape[:-1])}, got {describe(targets)}."
        )
    counted = targets if mask is None else targets[mask.to(device=targets.device, dtype=torch.bool)]
    low, high = (int(bound) for bound in counted.aminmax())
    if low < 0 or high >= head.vocabulary:
        raise ValueError(
            f"targets must lie in 0..{head.vocabulary - 1}, got values from {low} to {high}; "
            "mask out positions without a target."
        )


def _prepare(
    hidden: Tensor, head: Head, dtype: torch.dtype, count: int, chunk_tokens: int | None
) -> tuple[int, _Workspace]:
    if chunk_tokens is None:
        # A GPU is better used by more rows: twice as many took three quarters of the time on an H200.
        chunk_tokens = chunk_length(head.vocabulary, dtype, LOGITS_BYTES * (2 if hidden.is_cuda else 1))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
    chunk_tokens = min(chunk_tokens, count)
    return chunk_tokens, _Workspace(chunk_tokens, head.vocabulary, dtype, hidden.device)


def _flatten(hidden: Tensor, head: Head) -> Tensor:
    if hidden.ndim < 2 or not hidden.is_floating_point() or hidden.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"Hidden states must be floats of shape (..., {head.weight.shape[1]}) to fit the head, "
            f"got {describe(hidden)}."
        )
    return hidden.reshape(-1, hidden.shape[-1])


def _at_head(hidden: Tensor, head: Head) -> Tensor:
    """Hidden states on the head's device; in a model over several, a tied head is on the first."""
    return hidden.to(head.weight.device)


def _counted(mask: Tensor | None, hidden: Tensor) -> tuple[Tensor | None, int]:
    """Positions that count (None: all) and their number."""
    total = hidden.shape[:-1].numel()
    if mask is None:
        if total == 0:
            raise ValueError(f"No token to average over: the hidden states have shape {tuple(hidden.shape)}.")
        return None, total
    if mask.shape != hidden.shape[:-1] or mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"mask must be boolean or integer of shape {tuple(hidden.shape[:-1])}, got {describe(mask)}; "
            "fractional weights are not supported."
        )
    index = mask.reshape(-1).nonzero().squeeze(1)
    if len(index) == 0:
        raise ValueError(
            f"No token to average over: the mask leaves out all {total} positions. "
            "Check that the data has an answer part within the sequence length."
        )
    if len(index) == total:
        return None, total
    return send(index, hidden.device), len(index)


def _wide(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
