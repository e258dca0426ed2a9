"""The count of a search's memory: what autograd keeps, and how the choices on offer change it."""

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from expert_cases import experts_case
from pretend_gpu import GPU, pretend_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rco.compression.compression import Compression
from rco.compression.memory import saved_bytes_per_token, search_memory
from rco.compression.plan import make_plan, make_removal_plan
from rco.compression.switched_model import switched_model
from rco.formats.integer import PackedWeight, pack
from rco.formats.streaming import STREAM_SLOTS, pinned
from rco.models.moe.linears import model_linears
from rco.models.shapes import random_model
from rco.testing.search_cases import random_packed, sampled_gates, stored_shapes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded():
    return random_model("quick", device="cpu", dtype=torch.float32)


def tensors():
    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def test_saved_bytes_cover_the_linears_inputs_once_and_nothing_stays(loaded):
    linears = loaded.layout.linears(loaded.model)
    gc.collect()
    before = tensors()
    counted = saved_bytes_per_token(loaded, linears, torch.float32)
    gc.collect()
    assert tensors() == before
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    # At the least, the distinct inputs: of q/k/v, of o, of gate/up, of down.
    hidden, inner, blocks = 64, 128, 2
    assert counted >= 4 * blocks * (3 * hidden + inner)
    assert counted < 4 * blocks * 40 * (hidden + inner)


def test_checkpointing_and_streaming_take_less(loaded):
    plan = make_plan(loaded.layout, loaded.layout.linears(loaded.model), group_size=32)

    def needed(checkpointing, offload):
        return search_memory(
            loaded, plan, tokens=4096, dtype=torch.float32, checkpointing=checkpointing, offload=offload
        )

    plain = needed(False, False)
    assert needed(True, False).activations < plain.activations
    assert needed(False, True).candidates < plain.candidates
    assert plain.peak == plain.search + plain.originals
    total = 4 * sum(parameter.numel() for parameter in loaded.model.parameters())
    assert plain.weights + plain.originals == total


def options_of(model, name):
    """What a switched linear may take; one that is locked at its own weight is not switched."""
    return getattr(model.get_submodule(name), "options", ())


LOCKED = "model.layers.0.mlp.down_proj"
AT_SIXTEEN = {"packed": {}, "sixteen": {"widths": (2, 4, 16)}, "locked": {"locks": [f"{LOCKED}=16"]}}


@pytest.mark.parametrize("kind", AT_SIXTEEN)
def test_originals_are_given_up_by_linears_that_never_take_them(loaded, kind):
    settings = AT_SIXTEEN[kind]
    linears = loaded.layout.linears(loaded.model)
    plan = make_plan(loaded.layout, linears, group_size=32, **{"widths": (2, 4), **settings})
    packed = {
        info.name: {
            str(width): random_packed(info.out_features, info.in_features, width, 32, CPU) for width in (2, 4)
        }
        for info in plan.linears
    }
    with switched_model(loaded, plan, packed) as switched:
        holding = {
            info.name
            for info in plan.linears
            if any(isinstance(o, torch.Tensor) for o in options_of(loaded.model, info.name))
        }
        assert holding == ({info.name for info in plan.linears} if kind == "sixteen" else set())
        if kind == "locked":  # others have a column for 16 bits that they may not pick
            gates = torch.zeros(len(plan.groups), len(plan.widths))
            gates[:, plan.widths.index(16)] = 1.0
            with pytest.raises(ValueError, match="which is not allowed for its group"):
                switched.set_gates(gates)
    needed = search_memory(loaded, plan, tokens=64, dtype=torch.float32, checkpointing=False, offload=False)
    total = 4 * sum(parameter.numel() for parameter in loaded.model.parameters())
    assert needed.weights + needed.originals == total
    at_sixteen = [i for i in plan.linears if kind == "sixteen" or (kind == "locked" and i.name == LOCKED)]
    assert needed.originals == 4 * sum(i.parameters for i in plan.linears if i not in at_sixteen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a pretended GPU takes the real one's place")
@pytest.mark.parametrize(
    ("shape", "settings", "gone"),
    [
        ("quick", {"widths": (2, 4)}, "all"),
        ("quick", {"widths": (2, 4, 16)}, "none"),
        ("quick-moe", {"widths": (2, 4)}, "all"),
        ("quick-moe", {"widths": (2, 4), "locks": ["attention=16"]}, "experts"),
        (
            "quick-moe",
            {"widths": (2, 4), "locks": ["model.layers.1.mlp.experts.3.*=16"]},
            "all but layers.1.mlp",
        ),
        ("quick-moe", {"widths": (2, 4), "allow_prune": True}, "all but experts"),
    ],
)
def test_only_originals_that_nobody_holds_are_moved_to_the_host(shape, settings, gone, monkeypatch):
    loaded = random_model(shape, device="cpu", dtype=torch.float32)
    linears = model_linears(loaded.layout, loaded.model)
    plan = make_plan(loaded.layout, linears, group_size=32, **settings)
    backend = Compression(loaded, plan, Path("unused"))
    packed = {
        name: {str(width): random_packed(rows, cols, width, 32, CPU) for width in (2, 4)}
        for name, (rows, cols) in stored_shapes(plan.linears).items()
    }
    backend.set_packed(packed)
    moved = []
    monkeypatch.setattr(
        "rco.compression.compression.parked", lambda weights: nullcontext(moved.extend(weights))
    )
    needed = search_memory(loaded, plan, tokens=64, dtype=torch.float32, checkpointing=False, offload=False)
    with pretend_gpu(monkeypatch):
        loaded.model.to(GPU)
        of = {id(parameter): name for name, parameter in loaded.model.named_parameters()}
        with backend.switchable(searching=True):
            pass
    names = {of[id(weight)] for weight in moved}
    everything = {f"{name}.weight" for name in packed if "experts" not in name} | {
        n for n in packed if "experts" in n
    }
    kind, _, part = gone.partition(" but ")
    wanted = {
        "none": set(),
        "experts": {name for name in everything if "experts" in name},
        "all": {name for name in everything if not part or part not in name},
    }[kind]
    assert names == wanted
    assert len(moved) == len(names)
    assert needed.originals == 4 * sum(weight.numel() for weight in moved)


@pytest.mark.parametrize("locks", [[], ["experts=16"], ["attention=16"], ["model.layers.0.mlp.experts.*=16"]])
def test_what_is_streamed_needs_a_few_buffers_of_the_largest_layer(locks):
    loaded = random_model("quick-moe", device="cpu", dtype=torch.float32)
    linears = model_linears(loaded.layout, loaded.model)
    plan = make_plan(loaded.layout, linears, group_size=32, widths=(2, 4), locks=locks)
    packed = {
        name: {str(width): random_packed(rows, cols, width, 32, CPU) for width in (2, 4)}
        for name, (rows, cols) in stored_shapes(plan.linears).items()
    }
    streamed = []

    class Stream:
        def add(self, options):
            # One stands in for original weights that nobody may take.
            streamed.append(sum({id(o): o.nbytes for o in options if isinstance(o, PackedWeight)}.values()))
            return options

        def restart(self):
            pass

    with switched_model(loaded, plan, packed, stream=Stream()):
        pass
    needed = search_memory(loaded, plan, tokens=64, dtype=torch.float32, checkpointing=False, offload=True)
    assert needed.candidates == pytest.approx(STREAM_SLOTS * max(streamed), rel=0.1)
    assert len(plan.fetched_together) == len(streamed)


def test_pruning_keeps_what_its_backward_pass_reads():
    sparse = random_model("quick-moe", device="cpu", dtype=torch.float32)
    plan = make_removal_plan(model_linears(sparse.layout, sparse.model))
    tokens, hidden, inner, top_k, layers = 4096, 64, 32, 2, 2
    gc.collect()
    before = tensors()
    plain, less = (
        search_memory(
            sparse, plan, tokens=tokens, dtype=torch.float32, checkpointing=checkpointing, offload=False
        )
        for checkpointing in (False, True)
    )
    gc.collect()
    assert tensors() == before
    assert plain.weights == 4 * sum(parameter.numel() for parameter in sparse.model.parameters())
    assert plain.originals == plain.candidates == 0
    # At the least every pair's inner states, which the experts' backward pass starts from, and every token's input.
    assert plain.activations >= 4 * tokens * layers * (top_k * 2 * inner + hidden)
    assert less.activations == 4 * tokens * layers * hidden < plain.activations


class LiveBytes(TorchDispatchMode):
    """The most memory that tensors made inside hold at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet()

    def _gone(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage not in given and storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return out


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("tokens", [8, 256])
def test_experts_are_expected_to_be_decoded_and_differentiated_a_layer_at_a_time(tokens, prune, tmp_path):
    case = experts_case(tmp_path, CPU, torch.float32, prune=prune, length=tokens)
    (gates,) = sampled_gates(case, 1)
    with case.backend.objective(case.data) as objective, LiveBytes() as live:
        objective.enqueue(gates, 0)()
    needed = search_memory(
        case.loaded, case.backend.plan, tokens=tokens, dtype=torch.float32, checkpointing=False, offload=False
    )
    assert needed.activations + needed.workspace == pytest.approx(live.most, rel=0.3)


def test_options_side_by_side_are_the_same_options():
    weights = []
    for bits, zeros in ((2, None), (5, torch.randint(0, 32, (3, 2), dtype=torch.uint8))):
        codes = torch.randint(0, 1 << bits, (3, 50), dtype=torch.uint8)
        weights.append(PackedWeight(pack(codes, bits), torch.rand(3, 2).bfloat16(), zeros, bits, (3, 50), 25))
    moved = pinned(weights)
    assert len({part.untyped_storage().data_ptr() for w in moved for part in (w.packed, w.scales)}) == 1
    for before, after in zip(weights, moved, strict=True):
        assert torch.equal(before.dequantize(), after.dequantize())
        assert after.packed.data_ptr() % 16 == 0
