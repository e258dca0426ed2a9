"""What a run will take: what the estimate costs is bounded, and it times the blocks that the run computes."""

from contextlib import contextmanager

import pytest
import torch

from rco.compression.memory import saved_bytes_per_token
from rco.models.capture import block_kinds, lone_block
from rco.models.loading import wrap_model
from rco.models.moe.gates import expert_gates
from rco.models.moe.linears import model_linears
from rco.models.shapes import random_model
from rco.pipeline import estimate
from rco.pipeline.configs import QuantizeConfig
from rco.pipeline.planning import plan_compression
from rco.testing.tiny_models import tiny_model


def test_rounding_to_nearest_is_not_expected_to_take_longer(monkeypatch):
    """Than compensation; and without scales of inputs to calibrate, its candidates need no pass over the text."""
    monkeypatch.setattr(estimate, "forward_seconds", lambda *_: 1.0)
    base = {"model": "tiny-llama", "bpw": "6", "device": "cpu", "sequences": 64}
    seconds = {
        (formats, method): plan_compression(
            QuantizeConfig(**base, formats=formats, method=method), outline=True
        ).estimate.seconds
        for formats in ("nvfp4-a4,original", "nvfp4,original")
        for method in ("rtn", "gptq")
    }
    calibrated, plain = "nvfp4-a4,original", "nvfp4,original"
    assert seconds[calibrated, "rtn"] < seconds[calibrated, "gptq"] == seconds[plain, "gptq"]
    assert seconds[plain, "rtn"] == seconds[calibrated, "rtn"] - 2 * 64


@contextmanager
def counted_passes(loaded):
    """Every pass of a block inside: (index of the block, tokens, type of the hidden states)."""
    seen = []
    handles = [
        block.mlp.register_forward_pre_hook(
            lambda _, args, i=index: seen.append((i, args[0].shape[1], args[0].dtype))
        )
        for index, (_, block) in enumerate(loaded.layout.blocks(loaded.model))
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def simulated(monkeypatch, loaded, rate):
    """Clocks that run with the multiplications of the blocks alone, ``rate`` of them in a second."""
    now = [0.0]
    monkeypatch.setattr(estimate, "cpu_clock", lambda: now[0])

    each = products(loaded)

    def work(_, args):
        now[0] += args[0].shape[1] * each / rate

    for _, block in loaded.layout.blocks(loaded.model):
        block.mlp.register_forward_pre_hook(work)
    monkeypatch.setattr(estimate, "clock", lambda: now[0])
    return now


def products(loaded, index=0):
    block = loaded.layout.blocks(loaded.model)[index][1]
    return sum(p.numel() for p in block.parameters() if p.ndim == 2)


@pytest.mark.parametrize("per_pass", [1e-6, 1e-3, 0.02, 0.09, 1.0, 60.0])
@pytest.mark.parametrize("layers", [2, 12])
def test_its_cost_is_bounded_and_does_not_grow_with_the_number_of_blocks(monkeypatch, layers, per_pass):
    loaded = random_model("quick", device="cpu", dtype=torch.bfloat16, layers=layers)
    rate = 16 * products(loaded) / per_pass  # a pass over 16 tokens takes that many seconds
    now = simulated(monkeypatch, loaded, rate)
    with counted_passes(loaded) as seen:
        found = estimate.forward_seconds(loaded, torch.float32, 512)
    # Exact on a machine whose time goes with the multiplications.
    head = loaded.layout.head(loaded.model).weight.numel()
    assert found == pytest.approx(512 * (layers * products(loaded) + head) / rate)
    assert {index for index, _, _ in seen} == {0}
    assert {dtype for _, _, dtype in seen} == {torch.float32}
    # Sizes 16, 64, 256 and 512, each for a tenth of a second and a pass at most; a longer pass is the only one.
    assert now[0] <= max(per_pass, 4 * 0.2)
    assert len(seen) <= 4 * 5
    if per_pass > 0.1:
        assert [tokens for _, tokens, _ in seen] == [16]
    if per_pass < 1e-3:
        assert max(tokens for _, tokens, _ in seen) == 512


@pytest.mark.parametrize("threads", [1, 2])
def test_others_on_the_machine_do_not_count(monkeypatch, threads):
    """Where other processes take turns, time passes in which this one does not compute."""
    loaded = random_model("quick", device="cpu", dtype=torch.bfloat16, layers=2)
    rate = 16 * products(loaded) / 1e-3
    now = simulated(monkeypatch, loaded, rate)
    alone = estimate.forward_seconds(loaded, torch.float32, 512)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(estimate, "clock", lambda: 5 * now[0])
    monkeypatch.setattr(estimate, "cpu_clock", lambda: threads * now[0])
    assert estimate.forward_seconds(loaded, torch.float32, 512) == pytest.approx(alone)


def test_memory_is_probed_with_one_block_on_few_tokens():
    loaded = random_model("quick", device="cpu", dtype=torch.bfloat16, layers=12)
    with counted_passes(loaded) as seen:
        saved_bytes_per_token(loaded, loaded.layout.linears(loaded.model), torch.float32)
    assert {(index, dtype) for index, _, dtype in seen} == {(0, torch.float32)}
    assert sum(tokens for _, tokens, _ in seen) <= 2 * 64


def test_a_large_block_is_probed_with_fewer_tokens(monkeypatch):
    loaded = random_model("quick", device="cpu", dtype=torch.float32)
    linears = loaded.layout.linears(loaded.model)
    plenty = saved_bytes_per_token(loaded, linears, torch.float32)
    monkeypatch.setattr("rco.compression.memory._PROBE_PRODUCTS", 1)
    with counted_passes(loaded) as seen:
        assert saved_bytes_per_token(loaded, linears, torch.float32) == pytest.approx(plenty, rel=0.02)
    assert {tokens for _, tokens, _ in seen} == {16}


def saved_by_the_whole_model(loaded, linears, tokens=64):
    """The slow way: everything that autograd keeps in a pass of the whole model."""
    owned = {t.untyped_storage().data_ptr() for t in (*loaded.model.parameters(), *loaded.model.buffers())}
    found = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in owned and tensor.numel() >= tokens:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    weights = [info.module.weight for info in linears if info.role != "experts"]
    ids = (torch.arange(tokens) * 7919 % 90)[None]
    for weight in weights:
        weight.requires_grad_(True)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loaded.layout.final_hidden(loaded.model, ids)
    for weight in weights:
        weight.requires_grad_(False)
    return sum(found.values()) / tokens


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_blocks_of_every_kind_add_up_to_the_whole_model(model_type):
    loaded = wrap_model(tiny_model(model_type, dtype=torch.float32))
    linears = model_linears(loaded.layout, loaded.model)
    sparse = any(info.role == "experts" for info in linears)
    if sparse:
        with expert_gates(loaded.model) as gates:
            gates.set_gates(torch.ones(gates.num_gates, requires_grad=True))
            expected = saved_by_the_whole_model(loaded, linears)
    else:
        expected = saved_by_the_whole_model(loaded, linears)
    # The whole model keeps one copy of masks and rotary tables, which are no block's own.
    assert saved_bytes_per_token(loaded, linears, torch.float32, gated=sparse) == pytest.approx(
        expected, rel=0.1
    )


def test_kinds_of_blocks():
    dense = random_model("quick", device="cpu", dtype=torch.float32, layers=5)
    assert block_kinds(dense.model, dense.layout) == [(0, 5)]
    mixed = wrap_model(tiny_model("qwen3_moe", dtype=torch.float32, num_hidden_layers=4, mlp_only_layers=[1]))
    assert block_kinds(mixed.model, mixed.layout) == [(0, 3), (1, 1)]


def test_a_lone_block_computes_what_it_computes_in_the_model_and_leaves_no_trace():
    loaded = random_model("quick", device="cpu", dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    wide = wrap_model(random_model("quick", device="cpu", dtype=torch.float32).model)
    wide.model.load_state_dict({name: value.float() for name, value in before.items()})
    entered = {}
    for index, (_, block) in enumerate(wide.layout.blocks(wide.model)):
        block.register_forward_hook(lambda _, args, out, i=index: entered.update({i: (args[0], out)}))
    for index in range(2):
        with (
            lone_block(loaded.model, loaded.layout, index, tokens=24, dtype=torch.float32) as lone,
            torch.no_grad(),
        ):
            wide.layout.final_hidden(wide.model, (torch.arange(24) * 7919 % 256)[None])
            given, expected = entered[index]
            assert torch.allclose(
                lone(given), expected[0] if isinstance(expected, tuple) else expected, atol=1e-5
            )
            if index == 0:
                assert torch.equal(lone.hidden, given)
    after = loaded.model.state_dict()
    assert all(
        torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items()
    )
