"""The chunked losses on a GPU: half-precision operands, float32 sums."""

import pytest
import torch

from rco.losses import Head, chunked_kl

TOKENS, HIDDEN, VOCABULARY = 23, 16, 41


def make(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    return hidden, Head(weight, torch.randn(VOCABULARY, generator=generator).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [None, 5])
def test_gpu_halves_accumulate_in_float32_with_the_reference_on_the_cpu(top_k):
    student, head = make(13, dtype=torch.bfloat16)
    reference, other = make(14, dtype=torch.bfloat16)

    def cuda(head):
        return Head(head.weight.cuda().requires_grad_(), head.bias.cuda(), head.softcap)

    ours, ours_head = student.cuda().requires_grad_(), cuda(head)
    loss = chunked_kl(ours, ours_head, reference, cuda(other), chunk_tokens=5, top_k=top_k)
    loss.backward()
    exact = student.double().requires_grad_()
    exact_head = Head(head.weight.double().requires_grad_(), head.bias.double())
    exact_other = Head(other.weight.double(), other.bias.double())
    expected = chunked_kl(exact, exact_head, reference.double(), exact_other, top_k=top_k)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.cpu().double(), exact.grad, rtol=3e-2, atol=1e-3)
    torch.testing.assert_close(
        ours_head.weight.grad.cpu().double(), exact_head.weight.grad, rtol=3e-2, atol=1e-3
    )
