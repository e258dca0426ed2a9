import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from rco.models.moe.gates import expert_gates
from rco.testing.tiny_models import wide_moe


@pytest.mark.parametrize("mode", ["deployed", "scale"])
@pytest.mark.parametrize(("experts", "hidden"), [(64, 256), (512, 128)])
def test_a_search_step_takes_no_more_operations_than_a_training_step(experts, hidden, mode):
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

    counts = []
    for run in (plain, gated):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert 0 < counts[1] <= counts[0]
