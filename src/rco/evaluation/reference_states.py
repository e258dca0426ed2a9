"""Hidden states of a model on a data set, computed once for several measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rco.data.calibration import CalibrationSet
from rco.evaluation.statistics import EvaluationError, OnBatch, batches, hidden_states
from rco.losses import Head
from rco.models.loading import LoadedModel

__all__ = ["ReferenceStates", "head_of", "hidden_of"]


@dataclass(frozen=True, eq=False)
class ReferenceStates:
    """A model's last hidden states on a data set, from which its predictions are computed.

    Attributes:
        hidden: (S, L, H) on the CPU.
        head: The model's output layer.
        fingerprint: Fingerprint of the data.
    """

    hidden: Tensor
    head: Head
    fingerprint: str

    @classmethod
    @torch.no_grad()
    def compute(
        cls,
        loaded: LoadedModel,
        data: CalibrationSet,
        *,
        batch_size: int = 8,
        on_batch: OnBatch | None = None,
    ) -> ReferenceStates:
        """Run the model once; afterwards it may be changed or freed.

        The output layer is copied, so that quantizing it later does not change the reference.
        """
        parts = [
            hidden_states(loaded, data.tokens[rows]).cpu() for rows in batches(data, batch_size, on_batch)
        ]
        head = loaded.layout.head(loaded.model)
        bias = None if head.bias is None else head.bias.detach().clone()
        kept = replace(head, weight=head.weight.detach().clone(), bias=bias)
        return cls(torch.cat(parts), kept, data.fingerprint)


def head_of(source: LoadedModel | ReferenceStates, data: CalibrationSet) -> Head:
    """The output layer of a model, or of its states, which must be on this data."""
    if isinstance(source, LoadedModel):
        return source.layout.head(source.model)
    if source.fingerprint != data.fingerprint:
        raise EvaluationError("The reference was computed on other data; compute it on this data.")
    return source.head


def hidden_of(source: LoadedModel | ReferenceStates, data: CalibrationSet, rows: slice) -> Tensor:
    """(B, L, H) hidden states of some sequences, on the device of the output layer."""
    if isinstance(source, LoadedModel):
        return hidden_states(source, data.tokens[rows])
    return source.hidden[rows].to(source.head.weight.device)
