"""Groups, locks, ties and the rules of serving engines."""

import pytest

from rco.compression.plan import make_plan
from rco.models.layout import layout_for
from rco.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def llama():
    model = tiny_model("llama")
    return layout_for(model), layout_for(model).linears(model, include_head=True)


def test_every_linear_is_a_group_and_the_head_stays_out(llama):
    layout, linears = llama
    plan = make_plan(layout, linears, group_size=None)
    assert [g.name for g in plan.groups] == [info.name for info in linears if info.role != "head"]
    assert plan.skipped == tuple(info.name for info in linears if info.role == "head")
    assert not plan.symmetric


def test_locks_skips_and_ties(llama):
    layout, linears = llama
    plan = make_plan(
        layout,
        linears,
        group_size=None,
        widths=(2, 3, 4, 16),
        locks=["layers.0.*q_proj=4"],
        skips=["down_proj"],
        ties=["q_proj,k_proj,v_proj"],
    )
    first = plan.groups[0]
    assert first.name.endswith("q_proj+k_proj+v_proj")
    assert first.widths == (4,)
    assert all("down_proj" not in info.name for info in plan.linears)
    assert all("down_proj" in name or name == "lm_head" for name in plan.skipped)


def test_vllm_ties_what_it_merges_and_needs_symmetric_grids(llama):
    layout, linears = llama
    plan = make_plan(layout, linears, group_size=64, serve="vllm")
    assert plan.symmetric
    sizes = sorted(len(group.members) for group in plan.groups)
    assert set(sizes) == {1, 2, 3}  # o and down alone, gate with up, q with k and v
    with pytest.raises(ValueError, match="symmetric"):
        make_plan(layout, linears, group_size=64, serve="vllm", symmetric=False)
    assert not make_plan(layout, linears, group_size=64, serve="vllm", widths=(4, 8)).symmetric
    with pytest.raises(ValueError, match="all of them or none"):
        make_plan(layout, linears, group_size=64, serve="vllm", skips=["q_proj"])


def test_marlin_takes_four_and_eight_bits(llama):
    layout, linears = llama
    plan = make_plan(layout, linears, group_size=128, serve="vllm-marlin", widths=(4, 8, 16))
    assert plan.symmetric
    with pytest.raises(ValueError, match="widths 4, 8"):
        make_plan(layout, linears, group_size=128, serve="vllm-marlin", widths=(3, 4))
    with pytest.raises(ValueError, match="group sizes"):
        make_plan(layout, linears, group_size=48, serve="vllm-marlin", widths=(4, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"serve": "ollama"}, "Unknown engine"),
        ({"locks": ["q_proj"]}, "REGEX=WIDTH"),
        ({"locks": ["q_proj=9"]}, "possible are"),
        ({"locks": ["nothing_here=4"]}, "matches no linear"),
        ({"skips": ["("]}, "regular expression"),
        ({"skips": ["proj"]}, "nothing is left"),
        ({"ties": ["q_proj"]}, "two or more"),
        ({"ties": ["q_proj,nope"]}, "two or more"),
        ({"widths": (16,)}, "at least two"),
        ({"widths": (2, 9)}, "2 to 8 bits"),
        ({"ties": ["q_proj,k_proj"], "locks": ["q_proj=2", "k_proj=3"]}, "share one width"),
    ],
)
def test_what_cannot_work_is_refused(llama, arguments, message):
    layout, linears = llama
    with pytest.raises(ValueError, match=message):
        make_plan(layout, linears, group_size=None, **arguments)
