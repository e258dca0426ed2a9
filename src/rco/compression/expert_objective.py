"""The loss over masks of experts, and what EvoESAP's fitness needs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rco.compression.objective import LanguageModelObjective
from rco.losses import chunk_length

__all__ = ["ExpertObjective"]


class ExpertObjective(LanguageModelObjective):
    """KL to the full model as a function of keep gates; knows which layer an expert lies in.

    Args:
        group_blocks: Layer of every expert.
        arguments: As for :class:`rco.compression.objective.LanguageModelObjective`.
    """

    def __init__(self, *arguments: Any, group_blocks: Sequence[int], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group_blocks = list(group_blocks)

    @torch.no_grad()
    def acceptance(self, gates: Tensor, batch: int) -> Tensor:
        """Share of the pruned model's tokens that the full model would accept: mean overlap of the two.

        That is the probability with which speculative decoding keeps a drafted token, ``sum_v min(p_v, q_v)``.
        """
        if self._reference is None:
            raise ValueError("The acceptance compares with the full model; use the KL as the loss.")
        rows = slice(batch * self._batch_size, (batch + 1) * self._batch_size)
        tokens = self._calibration.tokens[rows].to(self._loaded.device)
        mask = self._calibration.mask[rows, :-1].to(self._loaded.device)
        self._set_gates(gates)
        hidden = self._loaded.layout.final_hidden(self._loaded.model, tokens)[:, :-1][mask]
        reference = self._reference.hidden[rows, :-1].to(self._loaded.device)[mask]
        head, full = self._student_head(), self._reference_head
        size = chunk_length(head.vocabulary)
        overlap = hidden.new_zeros((), dtype=torch.float64)
        for mine, theirs in zip(torch.split(hidden, size), torch.split(reference, size), strict=True):
            overlap += torch.minimum(head.probabilities(mine), full.probabilities(theirs)).double().sum()
        return overlap / max(len(hidden), 1)
