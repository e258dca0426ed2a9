"""Chunked losses against the same quantities from whole logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import GPU, pretend_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from rco.losses import (
    Head,
    chunk_length,
    chunked_cross_entropy,
    chunked_kl,
    token_cross_entropy,
    token_kl,
)

TOKENS, HIDDEN, VOCABULARY = 23, 7, 41


def whole_logits(hidden, head):
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def make(seed=0, *, bias=True, softcap=None, scale=1.0, shape=(TOKENS,), dtype=torch.float64, spread=2.0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    weight = spread * draw(VOCABULARY, HIDDEN)
    head = Head(weight, draw(VOCABULARY) if bias else None, softcap, scale)
    return draw(*shape, HIDDEN), head


def whole_kl(student, student_head, reference, reference_head):
    log_q = whole_logits(student, student_head).log_softmax(-1)
    log_p = whole_logits(reference, reference_head).log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def coarse_kl(student, student_head, reference, reference_head, k):
    """The definition: build both coarsened distributions, then their KL."""
    q = whole_logits(student, student_head).softmax(-1)
    p = whole_logits(reference, reference_head).softmax(-1)
    top = p.topk(k).indices
    inside = torch.zeros_like(p).scatter(1, top, 1.0)

    def coarsen(x):
        return torch.cat([x.gather(1, top), (x * (1 - inside)).sum(1, keepdim=True)], 1)

    p, q = coarsen(p), coarsen(q)
    return (p * (p.log() - q.log())).sum(1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    chunk=st.integers(1, 40),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 3.0, 30.0]),
    scale=st.sampled_from([1.0, 0.25]),
    masked=st.booleans(),
    top_k=st.sampled_from([None, 1, 5, VOCABULARY - 1, VOCABULARY, 1000]),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_kl_and_every_gradient_equal_whole_logits(
    seed, chunk, bias, softcap, scale, masked, top_k, reduction
):
    student, head = make(seed, bias=bias, softcap=softcap, scale=scale)
    reference, reference_head = make(seed + 1, bias=not bias, softcap=softcap)
    mask = torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.5 if masked else None
    if mask is not None:
        mask[seed % TOKENS] = True
    inputs = [tensor for tensor in (student, head.weight, head.bias) if tensor is not None]
    for tensor in inputs:
        tensor.requires_grad_()

    loss = chunked_kl(
        student, head, reference, reference_head, mask, chunk_tokens=chunk, top_k=top_k, reduction=reduction
    )
    if top_k is None or top_k >= VOCABULARY:
        per_token = whole_kl(student, head, reference, reference_head)
    else:
        per_token = coarse_kl(student, head, reference, reference_head, top_k)
    counted = per_token if mask is None else per_token[mask]
    expected = counted.mean() if reduction == "mean" else counted.sum()

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad(3 * loss, inputs)
    want = torch.autograd.grad(3 * expected, inputs)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    tokens = token_kl(student, head, reference, reference_head, mask, chunk_tokens=chunk, top_k=top_k)
    torch.testing.assert_close(tokens, counted.detach(), rtol=1e-11, atol=1e-13)
    assert not tokens.requires_grad


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    chunk=st.integers(1, 40),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    scale=st.sampled_from([1.0, 3.0]),
    masked=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_cross_entropy_and_every_gradient_equal_whole_logits(seed, chunk, softcap, scale, masked, reduction):
    hidden, head = make(seed, softcap=softcap, scale=scale)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    mask = None
    if masked:
        mask = (torch.rand(TOKENS, generator=generator) < 0.5).long()
        mask[seed % TOKENS] = 1
        targets[mask == 0] = -100  # what the mask leaves out is never read
    inputs = [hidden.requires_grad_(), head.weight.requires_grad_(), head.bias.requires_grad_()]
    loss = chunked_cross_entropy(hidden, head, targets, mask, chunk_tokens=chunk, reduction=reduction)
    expected = F.cross_entropy(whole_logits(hidden, head), targets, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    tokens = token_cross_entropy(hidden, head, targets, mask, chunk_tokens=chunk)
    torch.testing.assert_close(tokens.sum() / (1 if reduction == "sum" else len(tokens)), expected.detach())


def test_kl_of_equal_models_is_zero_with_zero_gradient():
    hidden, head = make()
    for top_k in (None, 3):
        student = hidden.clone().requires_grad_()
        loss = chunked_kl(student, head, hidden, head, chunk_tokens=4, top_k=top_k)
        loss.backward()
        assert abs(loss.item()) < 1e-14
        assert student.grad.abs().max() < 1e-15


def test_top_k_never_exceeds_the_full_divergence_and_grows_with_k():
    (student, head), (reference, other) = make(1), make(2)
    values = [token_kl(student, head, reference, other, top_k=k) for k in range(1, VOCABULARY + 1)]
    full = token_kl(student, head, reference, other)
    for smaller, larger in itertools.pairwise(values):
        assert (smaller <= larger + 1e-12).all()
    torch.testing.assert_close(values[-1], full)
    assert (values[0] < full - 1e-3).any()


def test_top_k_survives_a_tail_without_mass():
    # A reference so sure that its tail underflows, and a student so sure of another token that its does.
    weight = torch.eye(4)
    head = Head(weight)
    reference = torch.tensor([[400.0, 0.0, 0.0, 0.0]])
    student = torch.tensor([[0.0, 400.0, 0.0, 0.0]], requires_grad=True)
    loss = chunked_kl(student, head, reference, head, top_k=1)
    loss.backward()
    assert loss.item() == pytest.approx(400.0)
    torch.testing.assert_close(student.grad, torch.tensor([[-1.0, 1.0, 0.0, 0.0]]))


def test_leading_shapes_are_flattened_and_restored():
    student, head = make(3, shape=(2, 5, 3))
    reference, other = make(4, shape=(2, 5, 3))
    mask = torch.zeros(2, 5, 3, dtype=torch.bool)
    mask[0, 1], mask[1, 4, 2] = True, True
    student.requires_grad_()
    loss = chunked_kl(student, head, reference, other, mask, chunk_tokens=3)
    loss.backward()
    torch.testing.assert_close(loss, whole_kl(student, head, reference, other)[mask].mean())
    assert student.grad.shape == student.shape
    assert (student.grad[~mask] == 0).all()
    assert (student.grad[mask].abs().sum(-1) > 0).all()


def test_masked_tokens_are_not_touched():
    (student, head), (reference, other) = make(5), make(6)
    mask = torch.arange(TOKENS) % 3 == 0
    expected = chunked_kl(student[mask], head, reference[mask], other)
    student[~mask], reference[~mask] = torch.nan, torch.nan
    student.requires_grad_()
    loss = chunked_kl(student, head, reference, other, mask, chunk_tokens=5)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_accumulated_in_float32(dtype, monkeypatch):
    monkeypatch.setattr("rco.losses.head._SLICE_ELEMENTS", 64)  # several slices of the head
    student, head = make(7, dtype=dtype, softcap=20.0)
    reference, other = make(8, dtype=dtype, softcap=20.0)
    head = Head(head.weight.requires_grad_(), head.bias.requires_grad_(), head.softcap)
    student.requires_grad_()
    loss = chunked_kl(student, head, reference, other, chunk_tokens=6)
    loss.backward()

    def double(head):
        return Head(head.weight.detach().double(), head.bias.detach().double(), head.softcap)

    exact_student, exact_head = student.detach().double().requires_grad_(), double(head)
    exact_head.weight.requires_grad_()
    exact = whole_kl(exact_student, exact_head, reference.double(), double(other)).mean()
    exact.backward()
    assert loss.dtype == torch.float32
    # Rounding logits to half precision would be wrong by far more than this.
    assert loss.item() == pytest.approx(exact.item(), rel=3e-6)
    assert student.grad.dtype == dtype
    resolution = max(torch.finfo(dtype).eps, 5e-6)
    torch.testing.assert_close(
        student.grad.double(), exact_student.grad, rtol=2 * resolution, atol=resolution * 1e-2
    )
    torch.testing.assert_close(
        head.weight.grad.double(), exact_head.weight.grad, rtol=2 * resolution, atol=resolution * 1e-2
    )


def test_autocast_does_not_round_the_logits():
    student, head = make(9, dtype=torch.float32)
    reference, other = make(10, dtype=torch.float32)
    expected = chunked_kl(student, head, reference, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunked_kl(student, head, reference, other), expected)
        assert torch.equal(chunked_kl(student.requires_grad_(), head, reference, other), expected)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, and how many matrix products ran."""

    def __init__(self):
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        self.products += "mm" in function.__name__
        return result


@pytest.mark.parametrize("top_k", [None, 4])
def test_memory_does_not_grow_with_tokens_times_vocabulary(top_k):
    chunk, hidden_size = 16, 8

    def largest(tokens, vocabulary):
        head = Head(torch.randn(vocabulary, hidden_size))
        student = torch.randn(tokens, hidden_size, requires_grad=True)
        reference = torch.randn(tokens, hidden_size)
        with LargestTensor() as seen:
            chunked_kl(student, head, reference, head, chunk_tokens=chunk, top_k=top_k).backward()
            targets = torch.zeros(tokens, dtype=torch.int64)
            chunked_cross_entropy(student, head, targets, chunk_tokens=chunk).backward()
            token_kl(student, head, reference, head, chunk_tokens=chunk)
        return seen.elements

    for tokens, vocabulary in [(64, 100), (1024, 100), (64, 1000), (1024, 1000)]:
        assert largest(tokens, vocabulary) <= max(chunk * vocabulary, tokens * hidden_size)


def test_a_half_precision_head_is_never_widened_whole(monkeypatch):
    monkeypatch.setattr("rco.losses.head._SLICE_ELEMENTS", 512)
    head = Head(torch.randn(1000, 8).bfloat16())
    student, reference = torch.randn(2, 12, 8).bfloat16()
    with LargestTensor() as seen:
        chunked_kl(student.requires_grad_(), head, reference, head, chunk_tokens=2).backward()
    assert seen.elements <= head.weight.numel()  # the head itself passes by as a view; nothing larger exists


def test_no_gradient_work_without_need():
    student, head = make(11)
    reference, other = make(12)
    with LargestTensor() as plain:
        chunked_kl(student, head, reference, other)
    with LargestTensor() as disabled, torch.no_grad():
        chunked_kl(student.requires_grad_(), head, reference, other)
    with LargestTensor() as wanted:
        chunked_kl(student, head, reference, other)
    assert plain.products == disabled.products == 2
    assert wanted.products == 3


def test_chunk_length_follows_the_allowance():
    assert chunk_length(128_256) * 128_256 * 4 <= 64 * 2**20 < (chunk_length(128_256) + 1) * 128_256 * 4
    assert chunk_length(1000, torch.float64, 16_000) == 2
    assert chunk_length(10**9) == 1


def test_errors_say_what_is_wrong():
    student, head = make()
    reference, _ = make(1)
    with pytest.raises(ValueError, match="mask leaves out all 23 positions"):
        chunked_kl(student, head, reference, head, torch.zeros(TOKENS, dtype=torch.bool))
    with pytest.raises(ValueError, match="No token to average over"):
        chunked_kl(student[:0], head, reference[:0], head)
    with pytest.raises(ValueError, match="fractional weights"):
        chunked_kl(student, head, reference, head, torch.ones(TOKENS))
    with pytest.raises(ValueError, match="mask must be"):
        chunked_kl(student, head, reference, head, torch.ones(TOKENS + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="same tokens"):
        chunked_kl(student, head, reference[:-1], head)
    with pytest.raises(ValueError, match="one vocabulary"):
        chunked_kl(student, head, reference, Head(head.weight[:-1]))
    with pytest.raises(ValueError, match="fit the head"):
        chunked_kl(student[:, :-1], head, reference, head)
    with pytest.raises(ValueError, match="top_k"):
        chunked_kl(student, head, reference, head, top_k=0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunked_kl(student, head, reference, head, chunk_tokens=0)
    with pytest.raises(ValueError, match="reduction"):
        chunked_kl(student, head, reference, head, reduction="none")
    with pytest.raises(ValueError, match="-100 to"):
        chunked_cross_entropy(student, head, torch.full((TOKENS,), -100))
    with pytest.raises(ValueError, match="targets must be int64"):
        chunked_cross_entropy(student, head, torch.zeros(TOKENS))
    with pytest.raises(ValueError, match="bias"):
        Head(head.weight, torch.zeros(3))
    with pytest.raises(ValueError, match="softcap"):
        Head(head.weight, softcap=0.0)
    with pytest.raises(ValueError, match="vocabulary, hidden"):
        Head(torch.zeros(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a pretended GPU takes the real one's place")
def test_hidden_states_come_to_a_head_on_another_device(monkeypatch):
    hidden, reference, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(11, 8)
    targets = torch.randint(0, 11, (6,))

    def results(head):
        for loss in (
            lambda leaf: chunked_kl(leaf, head, reference, head),
            lambda leaf: chunked_cross_entropy(leaf, head, targets),
        ):
            leaf = hidden.clone().requires_grad_()
            value = loss(leaf)
            (gradient,) = torch.autograd.grad(value, leaf)
            yield value.detach().cpu(), gradient.cpu()

    wanted = list(results(Head(weight)))
    with pretend_gpu(monkeypatch):
        found = list(results(Head(weight.to(GPU))))
    torch.testing.assert_close(found, wanted)
