import statistics
import time

import pytest
import torch
import torch.nn.functional as F

from rco.models.moe_gates import expert_gates
from rco.models.moe_tiny import wide_moe


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["deployed", "scale"])
@pytest.mark.parametrize(("experts", "hidden"), [(64, 256), (512, 128)])
def test_a_search_step_costs_at_most_a_plain_step_and_a_third(experts, hidden, mode):
    torch.manual_seed(0)
    model = wide_moe(experts, hidden)
    tokens = torch.randint(0, 1024, (4, 128))
    reference = model(tokens).logits.detach().log_softmax(-1)
    keep = torch.cat([(torch.randperm(experts) >= experts // 4).float() for _ in range(2)]).requires_grad_()

    def step():
        logits = model(tokens).logits.log_softmax(-1)
        F.kl_div(logits, reference, log_target=True, reduction="batchmean").backward()

    def plain():
        model.zero_grad(set_to_none=True)
        step()

    def gated():
        with expert_gates(model, mode) as gates:
            gates.set_gates(keep)
            step()

    plain()
    gated()
    ratios = []
    for _ in range(7):  # taken in turns, so that a busy machine slows both
        times = []
        for run in (plain, gated):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    assert statistics.median(ratios) <= 1.3
