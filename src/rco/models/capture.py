"""Block-wise execution of a model, and capture of the inputs of its linears.

Calibration that quantizes block after block needs the input of each block under the blocks already changed, not a
full forward pass per block. :class:`BlockInputs` holds that input for all sequences and moves it through one block
at a time; :func:`linear_inputs` streams the inputs of named linears of a block. :func:`lone_block` runs one block
by itself, to measure its memory without running the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rco.models.layout import Layout
from rco.models.precision import computing_in
from rco.models.sequences import whole_sequences
from rco.models.skeleton import BlockCall, Reached, stood_in
from rco.models.zoo import ModelError

__all__ = [
    "BlockInputs",
    "LoneBlock",
    "LoneBlockError",
    "WholePasses",
    "block_inputs",
    "block_kinds",
    "linear_inputs",
    "lone_block",
]

logger = logging.getLogger(__name__)


class BlockInputs:
    """Hidden states that enter the next block, for every sequence, and the other arguments of the blocks.

    Only one batch of sequences is on the model's device at a time. Blocks get the same arguments as in a whole
    forward pass (each block its own: sliding and full attention have different masks), so running
    all of them and the final norm reproduces :meth:`Layout.final_hidden` bit for bit.

    Attributes:
        hidden: (S, L, H) on the storage device; the input of block ``position``. To resume, set both.
        position: Index of the next block.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, hidden: Tensor, calls: list[list[BlockCall]], batch: int
    ) -> None:
        self.model = model
        self.layout = layout
        self.hidden = hidden
        self.position = 0
        self._blocks = [block for _, block in layout.blocks(model)]
        self._calls = calls  # per batch, then per block; batches of one shape share theirs
        self._batch = batch

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        layout: Layout,
        tokens: Tensor,
        *,
        batch_size: int = 8,
        storage: str | torch.device | None = None,
    ) -> BlockInputs:
        """Embed all sequences and record the arguments of every block; no block is computed.

        Args:
            model: The causal language model.
            layout: Its row of the architecture table.
            tokens: (S, L) token ids, without padding.
            batch_size: Sequences on the model's device at a time.
            storage: Device of the hidden states of all sequences; None for the model's device.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(
                f"tokens must be (sequences, length) with at least one of each, got {tuple(tokens.shape)}."
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        device = layout.embedding(model).weight.device
        hidden: Tensor | None = None
        by_shape: dict[torch.Size, list[BlockCall]] = {}
        calls: list[list[BlockCall]] = []
        for start in range(0, len(tokens), batch_size):
            ids = tokens[start : start + batch_size].to(device)
            first, given = _trace(model, layout, ids)
            # Without padding these depend on the shape alone, so one copy is enough for all batches of that shape.
            calls.append(by_shape.setdefault(ids.shape, given))
            if hidden is None:
                place = device if storage is None else torch.device(storage)
                hidden = first.new_empty((*tokens.shape, first.shape[-1]), device=place)
            hidden[start : start + batch_size] = first.to(hidden.device)
        assert hidden is not None
        return cls(model, layout, hidden, calls, batch_size)

    def __len__(self) -> int:
        return len(self.hidden)

    @torch.no_grad()
    def outputs(self, block: nn.Module | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Run the next block over all sequences: yields slices of sequences with its output (b, L, H) for them.

        ``block`` replaces the model's own block, for instance by a quantized copy. Nothing is stored.
        """
        if self.position >= len(self._blocks):
            raise IndexError(f"All {len(self._blocks)} blocks have been run; call finish() or capture again.")
        module = self._blocks[self.position] if block is None else block
        parameter = next(module.parameters(), None)
        device = self.hidden.device if parameter is None else parameter.device
        for index, calls in enumerate(self._calls):
            rows = slice(index * self._batch, min((index + 1) * self._batch, len(self.hidden)))
            call = calls[self.position]
            yield rows, call.run(module, self.hidden[rows].to(device))

    def output(self, hidden: Tensor) -> Tensor:
        """The next block's output for the hidden states of some sequences, with gradients if they are enabled.

        ``hidden`` has as many sequences as a whole batch of :meth:`capture`, or as its last one.
        """
        calls = next(
            (each for each, size in zip(self._calls, self._sizes, strict=True) if size == len(hidden)), None
        )
        if calls is None:
            raise ValueError(
                f"Blocks were captured for batches of {sorted(set(self._sizes))} sequences, got {len(hidden)}."
            )
        call = calls[self.position]
        result = self._blocks[self.position](hidden, *call.args, **call.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    @property
    def _sizes(self) -> list[int]:
        """Sequences of every batch."""
        return [
            min(self._batch, len(self.hidden) - start) for start in range(0, len(self.hidden), self._batch)
        ]

    def observe(self, block: nn.Module | None = None) -> None:
        """Run the next block and drop the outputs, for hooks inside the block."""
        for _ in self.outputs(block):
            pass

    def advance(self, block: nn.Module | None = None) -> None:
        """Run the next block and make its outputs the inputs of the one after it.

        After an interruption the hidden states are a mixture; capture again, or set ``hidden`` from a saved copy.
        """
        for rows, output in self.outputs(block):
            self.hidden[rows] = output.to(self.hidden.device)
        self.position += 1

    @torch.no_grad()
    def finish(self) -> Tensor:
        """(S, L, H) after the final norm, once every block has been run: the input of the output layer."""
        if self.position != len(self._blocks):
            raise IndexError(
                f"{len(self._blocks) - self.position} blocks have not been run yet; call advance() for each."
            )
        result = self.hidden.new_empty(0)
        for start in range(0, len(self.hidden), self._batch):
            rows = slice(start, start + self._batch)
            part = _finished(self.model, self.layout, self.hidden[rows]).to(result.device)
            if not start:  # its columns may be others than those between blocks
                result = part.new_empty((*self.hidden.shape[:-1], part.shape[-1]))
            result[rows] = part
        return result


class WholePasses:
    """Whole forward passes in place of :class:`BlockInputs`, for blocks that cannot be run one by one.

    Attributes:
        position: Index of the next block.
    """

    def __init__(self, model: nn.Module, layout: Layout, tokens: Tensor, batch_size: int) -> None:
        self.model, self.layout, self.position = model, layout, 0
        self._tokens, self._batch = tokens, batch_size

    @torch.no_grad()
    def advance(self) -> None:
        """Run the model up to the next block, for hooks inside of it."""
        block = self.layout.blocks(self.model)[self.position][1]

        def stop(*_: Any) -> None:
            raise Reached

        hook = block.register_forward_hook(stop) if self.layout.tail.once else None
        try:
            for ids in self._batches():
                with suppress(Reached):
                    self.layout.final_hidden(self.model, ids)
        finally:
            if hook is not None:
                hook.remove()
        self.position += 1

    @torch.no_grad()
    def finish(self) -> Tensor:
        """(S, L, H) input of the output layer; every linear runs once over all sequences."""
        parts = [self.layout.final_hidden(self.model, ids).cpu() for ids in self._batches()]
        return torch.cat(parts)

    def _batches(self) -> Iterator[Tensor]:
        device = self.layout.embedding(self.model).weight.device
        for start in range(0, len(self._tokens), self._batch):
            yield self._tokens[start : start + self._batch].to(device)


def block_inputs(
    model: nn.Module, layout: Layout, tokens: Tensor, *, batch_size: int, storage: str | torch.device
) -> BlockInputs | WholePasses:
    """Block-wise passes if they reproduce the model on a few tokens, else whole passes.

    Arguments are those of :meth:`BlockInputs.capture`.
    """
    if layout.tail.chained and _reproduces(model, layout, tokens[:1, :_CHECKED_TOKENS]):
        return BlockInputs.capture(model, layout, tokens, batch_size=batch_size, storage=storage)
    logger.info("The blocks of %s cannot be run one by one; each needs whole passes.", type(model).__name__)
    return WholePasses(model, layout, tokens, batch_size)


_CHECKED_TOKENS = 16
_CHECKED_ERROR = 1e-3  # of the hidden states, relative; far above rounding, far below another computation


@torch.no_grad()
def _reproduces(model: nn.Module, layout: Layout, tokens: Tensor) -> bool:
    """Whether blocks that are run one by one give the model's last hidden states."""
    ids = tokens.to(layout.embedding(model).weight.device)
    hidden, calls = _trace(model, layout, ids)
    expected = layout.final_hidden(model, ids)
    try:
        for (_, block), call in zip(layout.blocks(model), calls, strict=True):
            parameter = next(block.parameters(), None)
            hidden = call.run(block, hidden if parameter is None else hidden.to(parameter.device))
        found = _finished(model, layout, hidden).to(expected.device)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        logger.info("A block of %s cannot be run by itself: %s", type(model).__name__, error)
        return False
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= _CHECKED_ERROR * expected.norm())


def _finished(model: nn.Module, layout: Layout, hidden: Tensor) -> Tensor:
    """The input of the output layer from the output of the last block."""
    norm = layout.final_norm(model)
    if norm is not None:
        parameter = next(norm.parameters(), None)
        after: Tensor = norm(hidden if parameter is None else hidden.to(parameter.device))
        return after
    blocks = [block for _, block in layout.blocks(model)]

    def answer(number: int, entering: Tensor, _: BlockCall) -> Tensor:
        return hidden.to(entering) if number == len(blocks) - 1 else entering

    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=layout.embedding(model).weight.device)
    with stood_in(blocks, answer, returned=layout.tail.returned):
        return layout.final_hidden(model, ids)


class LoneBlockError(ModelError):
    """A block needs more than its own input, so that it cannot be run alone."""


@dataclass(frozen=True)
class LoneBlock:
    """One block with the arguments from the model, in the type to compute in.

    Attributes:
        block: The block.
        hidden: (1, T, H), an input for it: the embedding of distinct tokens, as far as the vocabulary allows.
    """

    block: nn.Module
    hidden: Tensor
    _call: BlockCall

    def __call__(self, hidden: Tensor | None = None) -> Tensor:
        """The block's output (1, T, H); gradients flow if they are enabled."""
        try:
            return self._call.run(self.block, self.hidden if hidden is None else hidden)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise LoneBlockError(f"A {type(self.block).__name__} cannot be run by itself: {error}") from error

    @property
    def held(self) -> list[Tensor]:
        """Tensors held before a pass: parameters, buffers, masks and rotary tables."""
        given = [
            leaf for leaf in tree_leaves((self._call.args, self._call.kwargs)) if isinstance(leaf, Tensor)
        ]
        return [*self.block.parameters(), *self.block.buffers(), *given]


@contextmanager
def lone_block(
    model: nn.Module, layout: Layout, index: int, *, tokens: int, dtype: torch.dtype
) -> Iterator[LoneBlock]:
    """Block ``index`` ready to run on ``tokens`` tokens in ``dtype``; its own type is restored on exit.

    Only the embedding of the tokens is computed.

    Raises:
        LoneBlockError: The block needs more than its own input.
    """
    if not layout.tail.chained:
        raise LoneBlockError(f"The blocks of {type(model).__name__} do not form a chain.")
    embedding = layout.embedding(model).weight
    ids = torch.arange(tokens, device=embedding.device)[None] * 7919 % embedding.shape[0]
    first, calls = _trace(model, layout, ids)
    block = layout.blocks(model)[index][1]

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = tree_map(cast, (calls[index].args, calls[index].kwargs))
    parameter = next(block.parameters(), None)
    hidden = first.to(device=None if parameter is None else parameter.device, dtype=dtype)
    with computing_in(block, dtype):
        yield LoneBlock(block, hidden, replace(calls[index], args=args, kwargs=kwargs))


def block_kinds(model: nn.Module, layout: Layout) -> list[tuple[int, int]]:
    """The first block of every kind, and the number of blocks of that kind.

    Blocks are alike if they hold parameters of the same names and rows of the same length, so that sparse layers
    with more or fewer experts are of one kind.
    """
    kinds: dict[frozenset[tuple[str, int]], list[int]] = {}
    for index, (_, block) in enumerate(layout.blocks(model)):
        held = {
            (re.sub(r"\d+", "#", name), value.shape[-1] if value.ndim else 0)
            for name, value in block.named_parameters()
        }
        kinds.setdefault(frozenset(held), []).append(index)
    return [(members[0], len(members)) for members in kinds.values()]


@torch.no_grad()
def _trace(model: nn.Module, layout: Layout, ids: Tensor) -> tuple[Tensor, list[BlockCall]]:
    """Input of the first block, and the other arguments of each; the blocks themselves are skipped."""
    blocks = [block for _, block in layout.blocks(model)]
    calls: list[BlockCall] = []
    entered: list[Tensor] = []

    def record(_: int, hidden: Tensor, call: BlockCall) -> Tensor:
        entered.append(hidden)
        calls.append(call)
        if len(calls) == len(blocks):
            raise Reached
        return hidden

    entry = layout.entry(model)
    with stood_in(blocks, record, returned=layout.tail.returned), suppress(Reached), whole_sequences(entry):
        entry(input_ids=ids, use_cache=False)
    return entered[0], calls


@contextmanager
def linear_inputs(
    block: nn.Module, names: Iterable[str], callback: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``callback(name, x)`` with the input (tokens, in_features) of each named linear whenever it runs.

    Args:
        block: The block, or any module.
        names: Dotted names inside it (:attr:`LinearInfo.path`). Linears of one fused set read the same input, so
            naming one of a set is enough for statistics of all.
        callback: Called within the forward pass, without gradients; must copy what it keeps.
    """
    modules = dict(block.named_modules())
    wanted = list(names)
    unknown = [name for name in wanted if name not in modules]
    if unknown:
        raise ValueError(
            f"The block has no module {unknown[0]!r}; it has {', '.join(filter(None, modules))}."
        )

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        callback(name, x.detach().reshape(-1, x.shape[-1]))

    handles = []
    try:
        for name in wanted:
            handles.append(modules[name].register_forward_pre_hook(partial(hook, name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
