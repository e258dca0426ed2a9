"""Losses over whole assignments: the interface between searchers and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Answer",
    "CallableObjective",
    "ForwardingObjective",
    "Loss",
    "NoGradientError",
    "Objective",
    "Request",
    "as_objective",
    "one_hot",
]

Request = tuple[Tensor, int]  # gates (N, K) and a batch
Answer = tuple[float, Tensor]  # a loss and its gradient with respect to the gates


def one_hot(choices: np.ndarray, num_options: int) -> Tensor:
    """(N, K) float64 gates of an allocation."""
    gates = np.zeros((*choices.shape, num_options))
    np.put_along_axis(gates, choices[..., None], 1.0, axis=-1)
    return torch.from_numpy(gates)


class Loss(Protocol):
    """Minimal interface of a loss, for objects that are not derived from :class:`Objective`."""

    num_batches: int

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As :meth:`Objective.loss`."""
        ...


class Objective:
    """A loss over whole assignments.

    A subclass sets ``num_batches`` and defines :meth:`loss`; everything else is optional and has a default.
    Searchers also accept any object with ``num_batches`` and ``loss``, see :func:`as_objective`.

    Attributes:
        num_batches: Number of batches of :meth:`loss`.
        selection: The objective on batches that are held back for choosing among finished candidates; None: the
            choice uses this objective.
        curvature: (N, K, K) second-order cost of moving group i from option a to option b, all else unchanged; zero
            for a = b and never negative. The gradient alone predicts poorly for options that are far apart. None:
            unknown.
        group_blocks: Block (layer) of each of the N groups; None: unknown.
        tokens_per_batch: Tokens of one batch; None: unknown.
    """

    num_batches: int
    selection: Objective | None = None
    curvature: Tensor | None = None
    group_blocks: Sequence[Any] | None = None
    tokens_per_batch: int | None = None

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """Scalar loss on one batch; ``gates`` (N, K) has one-hot rows and may carry gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(gates, batch).")

    # ------------------------------------------------------------------ many requests

    def enqueue(self, gates: Tensor, batch: int) -> Callable[[], Answer]:
        """Begin the loss and its gradient with respect to the gates; the returned function waits for them.

        On a device that computes asynchronously, a step's samples run without a pause in between if all of them are
        enqueued before the first result is read. The default computes at once.
        """
        leaf = gates.detach().requires_grad_()
        loss = self.loss(leaf, batch)
        (gradient,) = torch.autograd.grad(loss, leaf)
        answer = float(loss.detach()), gradient
        return lambda: answer

    @torch.no_grad()
    def losses(self, requests: Sequence[Request]) -> list[float]:
        """The loss of every request, without gradient.

        A loss must depend neither on the other requests nor on where it is computed: a search then gives the
        same result on one device and on many. The same holds for :meth:`losses_and_gradients`.
        """
        # All requests are launched before the first result is read, which waits for the device.
        launched = [self.loss(gates, batch) for gates, batch in requests]
        return [float(loss) for loss in launched]

    def losses_and_gradients(self, requests: Iterable[Request]) -> list[Answer]:
        """The loss of every request and its gradient with respect to the gates.

        Requests are consumed one at a time: a device works on one while the next is made.
        """
        answers = [self.enqueue(gates, batch) for gates, batch in requests]
        return [answer() for answer in answers]

    # ------------------------------------------------------------- optional inputs of baselines

    def table(self, name: str) -> Tensor | None:
        """A table (N, K) of that name, or None. The default returns the attribute of that name.

        ``option_errors``: relative squared error of every option's weights; ``output_errors``: squared error of its
        outputs; ``layer_errors``: L2 norm of its effect on the output of its layer; ``fisher_losses``: second-order
        loss from sampled gradients.
        """
        found: Tensor | None = getattr(self, name, None)
        return found

    def with_tables(self, **tables: Tensor) -> Objective:
        """This objective with further tables; see :meth:`table`."""
        return _WithTables(self, tables) if tables else self

    def noisy_loss(self, gates: Tensor, batch: int, group: int, squared_error: float, seed: int) -> Tensor:
        """The loss with noise of a relative squared error on one group's weights; the seed decides the draw."""
        raise NotImplementedError(f"{type(self).__name__} cannot add noise to a group.")

    def acceptance(self, gates: Tensor, batch: int) -> Tensor:
        """Share in [0, 1] of the compressed model's tokens that the full model would accept; higher is better."""
        raise NotImplementedError(f"{type(self).__name__} has no acceptance.")

    def output_scores(self, gates: Tensor, batch: int) -> Answer:
        """Cross-entropy at the gates, and (N, K) scores of the options of every group.

        A score sums, over the outputs of a group's layers, squared gradients times squared changes of the output.
        """
        raise NotImplementedError(f"{type(self).__name__} has no outputs of layers.")

    def delta_losses(self, gates: Tensor, batch: int) -> Answer:
        """Cross-entropy at the gates, and (N,) scores of the options that the gates pick.

        A score sums sizes of gradients times changes, over a group's weights and rounded inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights of layers.")

    def offers(self, name: str) -> bool:
        """Whether an optional method (``noisy_loss``, ``acceptance``, ``output_scores``, ...) is defined."""
        own = getattr(self, name)
        return getattr(own, "__func__", own) is not getattr(Objective, name)

    @property
    def described(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__


class ForwardingObjective(Objective):
    """An objective that passes everything on to another one; subclasses change a part."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.num_batches = objective.num_batches
        self.selection = objective.selection
        self.curvature = objective.curvature
        self.group_blocks = objective.group_blocks
        self.tokens_per_batch = objective.tokens_per_batch

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """As the inner objective."""
        return self.objective.loss(gates, batch)

    def enqueue(self, gates: Tensor, batch: int) -> Callable[[], Answer]:
        """As the inner objective."""
        return self.objective.enqueue(gates, batch)

    def losses(self, requests: Sequence[Request]) -> list[float]:
        """As the inner objective."""
        return self.objective.losses(requests)

    def losses_and_gradients(self, requests: Iterable[Request]) -> list[Answer]:
        """As the inner objective."""
        return self.objective.losses_and_gradients(requests)

    def table(self, name: str) -> Tensor | None:
        """As the inner objective."""
        return self.objective.table(name)

    def noisy_loss(self, gates: Tensor, batch: int, group: int, squared_error: float, seed: int) -> Tensor:
        """As the inner objective."""
        return self.objective.noisy_loss(gates, batch, group, squared_error, seed)

    def acceptance(self, gates: Tensor, batch: int) -> Tensor:
        """As the inner objective."""
        return self.objective.acceptance(gates, batch)

    def output_scores(self, gates: Tensor, batch: int) -> Answer:
        """As the inner objective."""
        return self.objective.output_scores(gates, batch)

    def delta_losses(self, gates: Tensor, batch: int) -> Answer:
        """As the inner objective."""
        return self.objective.delta_losses(gates, batch)

    def offers(self, name: str) -> bool:
        """As the inner objective."""
        return self.objective.offers(name)

    @property
    def described(self) -> str:
        """As the inner objective."""
        return self.objective.described


class _WithTables(ForwardingObjective):
    def __init__(self, objective: Objective, tables: dict[str, Tensor]) -> None:
        super().__init__(objective)
        self._tables = tables

    def table(self, name: str) -> Tensor | None:
        return self._tables[name] if name in self._tables else super().table(name)


class _Adapted(Objective):
    """Any object with ``num_batches`` and ``loss``, and whichever optional parts it has."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.num_batches = given.num_batches
        selection = getattr(given, "selection", None)
        self.selection = None if selection is None or selection is given else as_objective(selection)
        self.curvature = getattr(given, "curvature", None)
        self.group_blocks = getattr(given, "group_blocks", None)
        self.tokens_per_batch = getattr(given, "tokens_per_batch", None)

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        loss: Tensor = self._given.loss(gates, batch)
        return loss

    def enqueue(self, gates: Tensor, batch: int) -> Callable[[], Answer]:
        if not hasattr(self._given, "enqueue"):
            return super().enqueue(gates, batch)
        answer: Callable[[], Answer] = self._given.enqueue(gates, batch)
        return answer

    def losses(self, requests: Sequence[Request]) -> list[float]:
        return self._given.losses(requests) if hasattr(self._given, "losses") else super().losses(requests)

    def losses_and_gradients(self, requests: Iterable[Request]) -> list[Answer]:
        if not hasattr(self._given, "losses_and_gradients"):
            return super().losses_and_gradients(requests)
        answers: list[Answer] = self._given.losses_and_gradients(list(requests))
        return answers

    def table(self, name: str) -> Tensor | None:
        found: Tensor | None = getattr(self._given, name, None)
        return found

    def noisy_loss(self, gates: Tensor, batch: int, group: int, squared_error: float, seed: int) -> Tensor:
        loss: Tensor = self._given.noisy_loss(gates, batch, group, squared_error, seed)
        return loss

    def acceptance(self, gates: Tensor, batch: int) -> Tensor:
        share: Tensor = self._given.acceptance(gates, batch)
        return share

    def output_scores(self, gates: Tensor, batch: int) -> Answer:
        found: Answer = self._given.output_scores(gates, batch)
        return found

    def delta_losses(self, gates: Tensor, batch: int) -> Answer:
        found: Answer = self._given.delta_losses(gates, batch)
        return found

    def offers(self, name: str) -> bool:
        return callable(getattr(self._given, name, None))

    @property
    def described(self) -> str:
        return type(self._given).__name__


def as_objective(given: Loss | Callable[[Tensor], Any]) -> Objective:
    """The objective itself, or one around a function or an object with ``num_batches`` and ``loss``.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, Objective):
        return given
    missing = [name for name in ("num_batches", "loss") if not hasattr(given, name)]
    if not missing:
        assert not isinstance(given, type), "an instance, not a class"
        return _Adapted(given)
    if callable(given) and not isinstance(given, type):
        return CallableObjective(given)
    raise TypeError(
        f"An objective needs num_batches and loss(gates, batch), but {type(given).__name__} has no "
        f"{' and no '.join(missing)}; derive from rco.Objective, or give a function of the gates."
    )


class NoGradientError(TypeError):
    """The loss gave no gradient with respect to the gates, which the method needs."""

    def __init__(self) -> None:
        super().__init__(
            "The loss gave no gradient with respect to the gates. Compute it with torch operations on the gates "
            "(no float(), item(), detach(), argmax() or numpy in between), or take a method without gradient: "
            'minimize(..., method="annealing"), "evopress", "greedy" or "random".'
        )


class CallableObjective(Objective):
    """A plain function of the gates as an objective with one batch.

    Args:
        loss_of_gates: The loss of gates (N, K): a tensor with gradient, or a plain number for methods that need no
            gradient. With ``batched``, the losses (B,) of gates (B, N, K).
        batched: Whether the function takes many allocations in one call.
        dtype: Type of the gates that the function gets. None: float64, or float32 if the function refuses that.
        device: Device of the gates that the function gets.
    """

    num_batches = 1

    def __init__(
        self,
        loss_of_gates: Callable[[Tensor], Any],
        *,
        batched: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(loss_of_gates):
            raise TypeError(f"The loss must be a function of the gates, got {type(loss_of_gates).__name__}.")
        self._loss, self._batched = loss_of_gates, batched
        self._dtype, self._device = dtype, torch.device(device)

    def loss(self, gates: Tensor, batch: int) -> Tensor:
        """The function's value; there is only batch 0."""
        return self._values(gates[None])[0] if self._batched else self._scalar(self._call(gates))

    def enqueue(self, gates: Tensor, batch: int) -> Callable[[], Answer]:
        """The loss and its gradient."""
        (answer,) = self.losses_and_gradients([(gates, batch)])
        return lambda: answer

    @torch.no_grad()
    def losses(self, requests: Sequence[Request]) -> list[float]:
        """The losses, in one call of a batched function."""
        if not self._batched:
            return super().losses(requests)
        found: list[float] = self._values(torch.stack([gates for gates, _ in requests])).tolist()
        return found

    def losses_and_gradients(self, requests: Iterable[Request]) -> list[Answer]:
        """The losses and gradients, in one call of a batched function."""
        gates = [gates for gates, _ in requests]
        if not self._batched:
            return [self._with_gradient(each.detach()) for each in gates]
        leaf = torch.stack(gates).detach().requires_grad_()
        losses = self._values(leaf)
        (gradients,) = torch.autograd.grad(_differentiable(losses).sum(), leaf)
        return list(zip(losses.detach().tolist(), gradients, strict=True))

    def _with_gradient(self, gates: Tensor) -> Answer:
        leaf = gates.requires_grad_()
        loss = self._scalar(self._call(leaf))
        (gradient,) = torch.autograd.grad(_differentiable(loss), leaf)
        return loss.item(), gradient

    def _call(self, gates: Tensor) -> Any:
        if self._dtype == gates.dtype and self._device == gates.device:
            return self._loss(gates)
        if self._dtype is not None:
            return self._loss(gates.to(self._device, self._dtype))
        try:
            found = self._loss(gates.to(self._device, torch.float64))
            self._dtype = torch.float64
        except RuntimeError as refused:
            if "requires grad" in str(refused):  # torch's refusal to leave the graph, as by numpy()
                raise NoGradientError from refused
            try:
                found = self._loss(gates.to(self._device, torch.float32))
            except RuntimeError:
                raise TypeError(
                    f"The loss failed on float64 and on float32 gates on {self._device}: {refused}. Give the type "
                    "and the device that it computes in, as dtype= and device=."
                ) from refused
            self._dtype = torch.float32
        return found

    def _scalar(self, found: Any) -> Tensor:
        loss = found if isinstance(found, Tensor) else torch.as_tensor(found, dtype=torch.float64)
        if loss.numel() != 1:
            raise ValueError(
                f"The loss must be one number, got shape {tuple(loss.shape)}; reduce it, for example by sum(), or "
                "give batched=True if it takes gates (B, N, K) and returns (B,)."
            )
        return loss if loss.dim() == 0 else loss.reshape(())

    def _values(self, gates: Tensor) -> Tensor:
        found = self._call(gates)
        losses = found if isinstance(found, Tensor) else torch.as_tensor(found, dtype=torch.float64)
        if losses.shape != gates.shape[:1]:
            raise ValueError(
                f"A batched loss takes gates (B, N, K) and returns (B,), but for {tuple(gates.shape)} it returned "
                f"shape {tuple(losses.shape)}."
            )
        return losses


def _differentiable(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise NoGradientError
    return loss
