"""Runs of a model in which its blocks, and often its output layer, are replaced by stand-ins.

Such a run multiplies almost nothing, so it is cheap for a model of any size. It shows which list of blocks the
forward pass walks, whether each block gets the output of the one before, and how the logits depend on the output
layer. On the meta device the same run checks shapes and identities, but no values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rco.models.sequences import whole_sequences
from rco.models.zoo import ModelError

__all__ = [
    "BlockCall",
    "Tail",
    "check_tail",
    "head_input",
    "inspect_blocks",
    "read_at_start",
    "replaced_forward",
    "stood_in",
]

_TOKENS = 5
_STATES = ("hidden_states", "hidden", "x", "input")


class Reached(BaseException):
    """Ends a forward pass at a place that has been reached; never leaves this package."""


class _HeadReached(Reached):
    """Ends a forward pass at the output layer."""


@dataclass(frozen=True)
class Tail:
    """Place of the blocks, and the steps from the last block to the logits.

    Attributes:
        stack: Path of the module that maps token ids to the last hidden state.
        blocks: Path of the list of blocks.
        norm: Path of the only module between the last block and the output layer; None if there is none or more.
        scale: Factor on the output layer's result.
        softcap: Bound of the logits; None if there is none.
        direct: The stack's ``last_hidden_state`` is the input of the output layer.
        chained: Each block's first argument is the output of the block before, (batch, tokens, width).
        once: Every block is called once, in order.
        returned: Length of the tuples that blocks return; 0 if they return a tensor.
        outer: Paths of modules outside the blocks that the forward pass calls.
    """

    stack: str
    blocks: str
    norm: str | None
    scale: float
    softcap: float | None
    direct: bool
    chained: bool
    once: bool
    returned: int
    outer: frozenset[str]


@dataclass(frozen=True)
class BlockCall:
    """Arguments of a block besides its hidden states: masks, rotary tables, positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None = None  # name of the argument with the hidden states, if it is given by name

    def run(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        """The output of a block for other hidden states and the same further arguments."""
        if self.keyword is None:
            result = block(hidden, *self.args, **self.kwargs)
        else:
            result = block(*self.args, **{self.keyword: hidden}, **self.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
        """Hidden states, and the other arguments of a call."""
        if args and isinstance(args[0], Tensor):
            return args[0], cls(args[1:], kwargs)
        name = next((n for n in (*_STATES, *kwargs) if isinstance(kwargs.get(n), Tensor)), None)
        if name is None:
            raise ModelError("A block is called without a tensor, so its hidden states cannot be found.")
        rest = {key: value for key, value in kwargs.items() if key != name}
        return cast(Tensor, kwargs[name]), cls(args, rest, name)


# ---------------------------------------------------------------------- replacing


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Context in which modules run other functions; an instance's own forward (of device hooks) is restored."""
    before = [vars(module).get("forward") for module in modules]
    try:
        for module, forward in zip(modules, forwards, strict=True):
            vars(module)["forward"] = forward
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own


def as_returned(result: Tensor, length: int) -> Any:
    """A block's result as its stack expects it: a tensor, or a tuple that begins with it."""
    return (result, *[None] * (length - 1)) if length else result


@contextmanager
def stood_in(
    blocks: Sequence[nn.Module], answer: Callable[[int, Tensor, BlockCall], Tensor], *, returned: int
) -> Iterator[None]:
    """Context in which every block returns ``answer(call number, hidden states, other arguments)``."""
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        number, calls = calls, calls + 1
        result = answer(number, *BlockCall.split(args, kwargs))
        return as_returned(result, returned)

    with replaced_forward(blocks, [forward] * len(blocks)):
        yield


def head_input(
    model: nn.Module, head: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """The input of the output layer in a forward pass of the whole model, which ends there."""
    entered: list[Tensor] = []

    def note(hidden: Tensor) -> Tensor:
        entered.append(hidden)
        raise _HeadReached

    with replaced_forward([head], [note]), suppress(_HeadReached):
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    if not entered:
        raise ModelError(f"{type(model).__name__} does not call its output layer.")
    return entered[0]


# ---------------------------------------------------------------------- checking


@dataclass
class _Trace:
    """What one run with stand-ins showed."""

    order: list[int]  # index of the block of every call
    chained: bool
    entering: Tensor | None  # input of the output layer
    product: Tensor | None  # result of the output layer's stand-in
    logits: Tensor | None
    makers: dict[int, str]  # id of a tensor -> last module outside the blocks that returned it
    takers: dict[str, list[int]]  # module outside the blocks -> ids of the tensors given to it
    last: Tensor | None  # output of the last call
    held: list[Any]  # keeps tensors alive, so that ids stay distinct


def check_tail(model: nn.Module, head: nn.Module, lists: Sequence[str], config: Any) -> Tail:
    """Find the list of blocks that the forward pass walks, and the steps from the last block to the logits.

    Args:
        model: The causal language model.
        head: Its output layer.
        lists: Paths of lists that may hold the blocks, the likeliest first.
        config: Its text configuration.

    Raises:
        ModelError: No list is walked, or the logits are not a scaled and bounded product of the output layer.
    """
    reasons: list[str] = []
    for path in lists:
        blocks = list(cast(nn.ModuleList, model.get_submodule(path)))
        for returned in range(4):
            try:
                trace = _run(model, head, blocks, path, model, returned)
            except Exception as error:  # noqa: BLE001 - any failure only rules out this stand-in
                reasons.append(f"{path}: {type(error).__name__}: {error}")
                continue
            if not trace.order or trace.entering is None or trace.logits is None:
                reasons.append(f"{path}: it is not called, or the output layer is not.")
                continue
            if trace.last is None or trace.entering.shape[:-1] != (1, _TOKENS):
                reasons.append(f"{path}: hidden states of shape {tuple(trace.entering.shape)}.")
                continue
            scale, softcap = _after_head(trace, config, type(model).__name__)
            stack, found = _find_stack(model, head, blocks, path, returned, trace)
            direct, norm = found is not None, None if found is None else _norm(found)
            once = trace.order == list(range(len(blocks)))
            outer = frozenset(name for name in trace.takers if not name.startswith(f"{path}."))
            return Tail(
                stack, path, norm, scale, softcap, direct, trace.chained and once, once, returned, outer
            )
    raise ModelError(
        f"The blocks of {type(model).__name__} could not be found: no list of its modules is run between the "
        f"embedding and the output layer ({'; '.join(reasons[:3]) or 'it has no list of modules'}). Pass a causal "
        "language model of transformers."
    )


def _ids(model: nn.Module) -> Tensor:
    embedding = cast(Any, model).get_input_embeddings().weight
    ids: Tensor = torch.arange(_TOKENS, device=embedding.device)[None] % embedding.shape[0]
    return ids


def _drawn(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    if like.is_meta:
        return torch.empty(tuple(shape), dtype=like.dtype, device="meta")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(like)


def _run(
    model: nn.Module, head: nn.Module, blocks: list[nn.Module], path: str, entry: nn.Module, returned: int
) -> _Trace:
    """Run ``entry`` (the model or a part of it) with stand-ins for the blocks and the output layer."""
    trace = _Trace([], True, None, None, None, {}, {}, None, [])
    number_of = {id(block): index for index, block in enumerate(blocks)}
    position = 0

    def block_forward(block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal position
            hidden, _ = BlockCall.split(args, kwargs)
            if trace.last is not None and not _same(hidden, trace.last):
                trace.chained = False
            trace.chained &= hidden.ndim == 3 and tuple(hidden.shape[:2]) == (1, _TOKENS)
            result = _drawn(hidden.shape, hidden, position)
            trace.order.append(number_of[id(block)])
            trace.last, position = result, position + 1
            trace.held.append(result)
            return as_returned(result, returned)

        return forward

    def head_forward(hidden: Tensor) -> Tensor:
        weight = cast(Tensor, head.weight)
        trace.entering = hidden
        trace.product = _drawn((*hidden.shape[:-1], weight.shape[0]), hidden, -1)
        return trace.product

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            trace.held += [*given, result]
            trace.takers.setdefault(name, []).extend(map(id, given))
            if isinstance(result, Tensor):
                trace.makers[id(result)] = name

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if module is not model and module is not head and not name.startswith(f"{path}."):
                if not name or path.startswith(f"{name}.") or name == path:
                    continue
                hook = module.register_forward_hook(watch(name), with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(replaced_forward([*blocks, head], [*map(block_forward, blocks), head_forward]))
        stack.enter_context(whole_sequences(entry))  # its checks read values, which the meta device has not
        output = entry(input_ids=_ids(model), use_cache=False)
    if entry is model:
        trace.logits = output.logits
    else:
        trace.entering = output.last_hidden_state
    return trace


def _same(first: Tensor, second: Tensor) -> bool:
    if first is second:
        return True
    return first.shape == second.shape and not first.is_meta and bool(torch.equal(first, second))


def _norm(trace: _Trace) -> str | None:
    """The module that made the output layer's input from the last block's output."""
    name = trace.makers.get(id(trace.entering))
    return name if name is not None and id(trace.last) in trace.takers[name] else None


def _find_stack(
    model: nn.Module, head: nn.Module, blocks: list[nn.Module], path: str, returned: int, trace: _Trace
) -> tuple[str, _Trace | None]:
    """The innermost module around the blocks that yields the output layer's input from token ids, and its run.

    The outermost module around the blocks and None if there is none.
    """
    parts = path.split(".")[:-1]
    assert trace.entering is not None
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found = _run(model, head, blocks, path, model.get_submodule(name), returned)
        except Exception:  # noqa: BLE001 - this part cannot be run by itself; the next may be
            continue
        if isinstance(found.entering, Tensor) and found.order == trace.order:
            alike = found.entering.shape == trace.entering.shape
            if alike and (found.entering.is_meta or torch.equal(found.entering, trace.entering)):
                return name, found
    return ".".join(parts[:1]), None


def _after_head(trace: _Trace, config: Any, name: str) -> tuple[float, float | None]:
    """Scale and bound of the logits; values that the configuration names are preferred to fitted ones."""
    product, logits = trace.product, trace.logits
    assert product is not None
    assert logits is not None
    if logits.shape != product.shape:
        raise ModelError(
            f"The logits of {name} have shape {tuple(logits.shape)}, and its output layer gives "
            f"{tuple(product.shape)}; such a model is not supported."
        )
    if product.is_meta:
        return 1.0, None
    numbers = {
        key: float(value)
        for key, value in config.to_dict().items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1)
    }
    caps = [None, *(value for key, value in numbers.items() if "cap" in key and value > 0)]
    scales = [1.0, *(s for value in numbers.values() for s in (value, 1 / value))]
    tolerance = 8 * torch.finfo(product.dtype).eps
    wanted, given = logits.double(), product.double()
    for cap in caps:
        # Before the bound: without one, all logits have one factor.
        inverse = wanted if cap is None else torch.atanh((wanted / cap).clamp(-1 + 1e-9, 1 - 1e-9)) * cap
        steady = wanted.abs() < (0.9 * cap if cap is not None else torch.inf)
        middle = given.abs() > 0.1
        if not bool((steady & middle).any()):
            continue
        fitted = float((inverse / given)[steady & middle].median())
        for scale in [s for s in scales if abs(s / fitted - 1) < 0.02] + [fitted]:
            made = given * scale
            made = made if cap is None else torch.tanh(made / cap) * cap
            if torch.allclose(made, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())):
                return scale, cap
    raise ModelError(
        f"The logits of {name} are neither the result of its output layer nor a scaled or bounded form of it, so "
        "losses cannot be computed from hidden states; such a model is not supported."
    )


# ---------------------------------------------------------------------- looking


class _Watched(nn.Module):
    """A stand-in for a linear that notes when its weight is read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._tensors = {"weight": (linear.weight,), "bias": (linear.bias,)}  # not parameters of this module
        self.read = False

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            self.read |= name == "weight"
            return self._tensors[name][0]
        return super().__getattr__(name)


def read_at_start(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """Paths of linears inside a block whose weights transformers reads while it builds a model.

    They have no weight yet when a packed checkpoint is loaded, so they cannot be packed.
    """
    start = getattr(model, "_init_weights", None)
    found: dict[str, None] = {}
    seen: set[type] = set()
    for block in blocks:
        kinds = {type(module) for module in block.modules()}
        if start is None or kinds <= seen:
            continue
        seen |= kinds
        tensors = [*block.parameters(), *block.buffers()]
        clone = copy.deepcopy(block, {id(t): _empty(t) for t in tensors})
        linears = [path for path, module in clone.named_modules() if isinstance(module, nn.Linear)]
        for path in linears:
            parent, _, name = path.rpartition(".")
            owner = clone.get_submodule(parent)
            owner._modules[name] = _Watched(cast(nn.Linear, owner._modules[name]))
        for module in clone.modules():
            if not isinstance(module, _Watched):
                with suppress(AttributeError), torch.no_grad():
                    start(module)
        found |= {path: None for path in linears if cast(_Watched, clone.get_submodule(path)).read}
    return tuple(found)


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def inspect_blocks(blocks: nn.ModuleList) -> tuple[str, ...]:
    """Paths of linears inside a block that are never compressed: routers, and gates of one row.

    A router stands beside the experts and has one row for each.
    """
    kept: dict[str, None] = {}
    for block in blocks:
        for path, module in block.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or weight.ndim != 2:
                continue
            if isinstance(module, nn.Linear) and weight.shape[0] == 1:
                kept[path] = None
        for path, parent in block.named_modules():
            count = max((_experts_in(child) for child in parent.children()), default=0)
            if not count:
                continue
            for name, module in parent.named_modules():
                weight = getattr(module, "weight", None)
                rows = weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else 0
                inside_expert = any(part.isdigit() for part in name.split("."))
                if rows == count and not inside_expert and "shared" not in name:
                    kept[f"{path}.{name}" if path else name] = None
    return tuple(kept)


def _experts_in(module: nn.Module) -> int:
    """Number of experts that a module holds, as stacked matrices or as a list; 0 if it holds none."""
    if isinstance(module, nn.ModuleList):
        kinds = {type(child) for child in module}
        inner = all(any(isinstance(m, nn.Linear) for m in child.modules()) for child in module)
        return len(module) if len(module) > 1 and len(kinds) == 1 and inner else 0
    stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    convolution = isinstance(module, nn.Conv1d)
    return int(stacked[0].shape[0]) if len(stacked) > 1 and not convolution else 0
