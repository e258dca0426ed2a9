"""Cooperation of the processes that torchrun starts: a thin layer over torch.distributed.

Rank 0 runs the job; the other ranks wait for its calls and take their share of the work. Messages are small
(gates, gradients, losses), so they go over gloo between the hosts' memories, whatever device each rank computes on.
Work is assigned by number and its results are returned in that order, so they do not depend on the number of ranks.
Without torchrun there is one rank, which does everything without communication.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rco.core.objective import Answer, ForwardingObjective, Loss, Objective, Request, as_objective

__all__ = ["RankLostError", "Ranks", "SharedObjective", "is_first_rank", "join", "serve", "shared"]

T = TypeVar("T")


class RankLostError(ConnectionError):
    """Another rank has failed, ended or timed out; the job cannot go on without it."""


@dataclass(frozen=True)
class Ranks:
    """All ranks, from the point of view of one of them.

    Attributes:
        index: This rank.
        count: All ranks.
        local: This rank among those of its machine.
        local_count: Ranks of this machine.
    """

    index: int = 0
    count: int = 1
    local: int = 0
    local_count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that runs the job, and the only one that writes and prints."""
        return self.index == 0

    def device(self, wanted: str, several: bool = False) -> str:
        """Device of this rank: its own GPU if ``wanted`` is ``cuda``; with ``several``, the first of its GPUs."""
        if self.count == 1 or wanted != "cuda" or not torch.cuda.is_available():
            return wanted
        there = torch.cuda.device_count()
        if self.local_count > there:
            raise ValueError(
                f"{self.local_count} ranks on this machine, but {there} GPUs: start at most {there} with "
                f"--nproc-per-node {there}, or give `device='cpu'`."
            )
        mine = self.gpus[0] if several else self.local
        torch.cuda.set_device(mine)
        return f"cuda:{mine}"

    @property
    def gpus(self) -> range:
        """This rank's part of the machine's GPUs, for a model that needs more than one."""
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return range(self.local * there // self.local_count, (self.local + 1) * there // self.local_count)

    # ------------------------------------------------------------ all together

    def broadcast(self, value: T) -> T:
        """The value passed by rank 0, at every rank; values of the others are ignored."""
        if self.count == 1:
            return value
        box = [value if self.first else None]
        with _talking():
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def gather(self, function: Callable[[], T]) -> list[T]:
        """Every rank's result, in the order of the ranks, at every rank; if one fails, all do."""
        if self.count == 1:
            return [function()]
        try:
            mine: tuple[T | None, str | None] = (function(), None)
        except Exception as error:
            self._exchange((None, f"{type(error).__name__}: {error}"))
            raise
        results = []
        for rank, (result, failure) in enumerate(self._exchange(mine)):
            if failure is not None:
                raise RankLostError(f"Rank {rank} of {self.count} failed: {failure}")
            results.append(result)
        return results  # type: ignore[return-value]

    def map(self, function: Callable[[Sequence[int]], Sequence[T]], items: int) -> list[T]:
        """Results of all items, in their order, at every rank; ``function`` gets the numbers of a rank's items."""
        shares = self.gather(lambda: list(function(range(self.index, items, self.count))))
        return [shares[item % self.count][item // self.count] for item in range(items)]

    def require_same(self, what: str, value: Any) -> None:
        """Raise an error unless all ranks pass the same value."""
        values = self.gather(lambda: value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"Rank {rank} has another {what} than rank 0: give all ranks the same command and files."
                )

    def _exchange(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        with _talking():
            dist.all_gather_object(values, value)
        return values

    # ------------------------------------------------------------- call and follow

    def call(self, task: str, *arguments: Any) -> None:
        """Rank 0: start a task of :meth:`follow` on the other ranks; rank 0 must join it right after."""
        self.broadcast((task, arguments))

    def dismiss(self) -> None:
        """Rank 0: end :meth:`follow` on the other ranks."""
        self.broadcast(None)

    def follow(self, tasks: Mapping[str, Callable[..., object]]) -> None:
        """Other ranks: run the tasks that rank 0 calls, until it dismisses them."""
        while (called := self.broadcast(None)) is not None:
            task, arguments = called
            tasks[task](*arguments)


def is_first_rank() -> bool:
    """Whether this process may write and print: rank 0 of a torchrun, or any process without one."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def join(timeout: float = 30.0) -> Iterator[Ranks]:
    """Context that connects to the other ranks, if torchrun has started any, and disconnects at the end.

    Inside, a request to terminate (torchrun sends one to all ranks when one has died) is a :class:`RankLostError`.

    Args:
        timeout: Minutes to wait for a rank before the job fails.
    """
    if not timeout > 0:
        raise ValueError(f"The timeout must be positive, got {timeout} minutes.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    # Imported before the process group exists: functions of this module take the current group as a default and
    # would keep it to the end of the process. Its threads would outlive the interpreter, which can abort it.
    import torch.distributed.nn.functional  # noqa: F401

    with _talking():
        dist.init_process_group("gloo", timeout=timedelta(minutes=timeout))
    try:
        with _termination_raises():
            yield Ranks(
                dist.get_rank(),
                dist.get_world_size(),
                int(os.environ.get("LOCAL_RANK", "0")),
                int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            )
    finally:
        dist.destroy_process_group()


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's error for closed connections and timeouts
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankLostError(
            f"Another rank has ended or does not answer ({reason}); see its own error message."
        ) from error


@contextmanager
def _termination_raises() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def lost(*_: object) -> None:
        raise RankLostError("Terminated by a signal: another rank has ended, or the job was stopped.")

    before = signal.signal(signal.SIGTERM, lost)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------- objectives


class SharedObjective(ForwardingObjective):
    """Objective of rank 0 whose requests are computed by all ranks, each of which has the same objective.

    Only the losses of many requests are distributed; everything else is the objective's own.
    """

    def __init__(self, objective: Objective, ranks: Ranks, held_back: bool = False) -> None:
        super().__init__(objective)
        self._ranks, self._held_back = ranks, held_back
        if not held_back:
            self.selection = SharedObjective(_split(objective, held_back=True), ranks, held_back=True)

    def losses(self, requests: Sequence[Request]) -> list[float]:
        """The loss of every request, without gradient."""
        return self._ask("losses", requests)

    def losses_and_gradients(self, requests: Iterable[Request]) -> list[Answer]:
        """The loss of every request and its gradient with respect to the gates."""
        return self._ask("losses_and_gradients", list(requests))

    def _ask(self, question: str, requests: Sequence[Request]) -> list[Any]:
        plain = [(gates.detach(), batch) for gates, batch in requests]
        self._ranks.broadcast((self._held_back, question, plain))
        return _answer(self.objective, self._ranks, question, plain)


def _split(objective: Objective, held_back: bool) -> Objective:
    """The objective, or its held-back split if it has one."""
    return objective.selection if held_back and objective.selection is not None else objective


def _answer(objective: Objective, ranks: Ranks, question: str, requests: Sequence[Request]) -> list[Any]:
    """The results of all ranks, in the order of the requests."""

    def ask(mine: Sequence[int]) -> Sequence[Any]:
        own = [requests[item] for item in mine]
        return objective.losses(own) if question == "losses" else objective.losses_and_gradients(own)

    return ranks.map(ask, len(requests))


@contextmanager
def shared(objective: Loss, ranks: Ranks) -> Iterator[Objective]:
    """Rank 0: the objective, computed by all ranks; the others must be in :func:`serve`."""
    if ranks.count == 1:
        yield as_objective(objective)
        return
    yield SharedObjective(as_objective(objective), ranks)
    # Not after an error: the others then fail because rank 0 has ended.
    ranks.broadcast(None)


def serve(objective: Loss, ranks: Ranks) -> None:
    """Other ranks: compute rank 0's requests to the objective until it is done."""
    own = as_objective(objective)
    while (asked := ranks.broadcast(None)) is not None:
        held_back, question, requests = asked
        _answer(_split(own, held_back), ranks, question, requests)
