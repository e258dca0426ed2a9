"""The picture of experts' widths."""

import html
import re

import pytest
import torch

from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.data.calibration import CalibrationSet
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.pipeline.describe import _expert_widths
from rco.report import render_report
from rco.report.data import ReportError, RunData, expert_width_layers
from rco.report.maps import frequency_map, width_map
from rco.testing.tiny_models import tiny_moe, tiny_tokens


def make_run(**changes):
    layers = [
        {"layer": 0, "widths": [[2, 2, 2], [4, 4, 3], [0, 0, 0]], "frequency": [0.1, 0.6, 0.0]},
        {"layer": 2, "widths": [[8, 8, 8], [2, 2, 2], [3, 3, 3]], "frequency": [0.3, 0.3, 0.3]},
    ]
    found = {"layers": layers, "minimum_tokens": 64, "topped_up": 1, "added_tokens": 12, **changes}
    return RunData("run", metrics={"expert_widths": found})


def words_of(run):
    """The text of the page, without tags."""
    return html.unescape(
        re.sub(r"\s+", " ", re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", "", page_of(run), flags=re.S))
    )


def page_of(run):
    return render_report([run])


def test_every_expert_is_drawn_with_its_width_and_frequency():
    layers = expert_width_layers(make_run())
    first, second = width_map(layers)
    # One colour per expert of one width, three for the one whose projections differ.
    assert [strip.colours for strip in first.strips] == [("w2",), ("w4", "w4", "w3"), ("w0",)]
    assert [strip.colours for strip in second.strips] == [("w8",), ("w2",), ("w3",)]
    assert (
        first.strips[1].title
        == "Layer 0, expert 1: gate 4, up 4, down 3 bits, chosen by 60.0 % of the tokens"
    )
    assert first.strips[2].title == "Layer 0, expert 2: pruned, chosen by 0.0 % of the tokens"
    shades = [[int(strip.colours[0][1:]) for strip in row.strips] for row in frequency_map(layers)]
    assert shades == [[2, 8, 0], [5, 5, 5]]  # the busiest has the darkest, an unused one none
    page = page_of(make_run())
    drawn = re.findall(r'<td class="(w\d)"', page)
    assert drawn == ["w2", "w4", "w0", "w4", "w3", "w8", "w2", "w3"]
    for strip in (*first.strips, *second.strips):
        assert strip.title in page
    words = words_of(make_run())
    assert "12 in all" in words
    assert "1 expert of 6 had fewer" in words
    plain = words_of(make_run(minimum_tokens=None))
    assert "without calibration tokens" in plain
    assert "was fitted" not in plain
    first, second = expert_width_layers(make_run())
    assert first.mean == pytest.approx((6 + 11) / 9)
    assert first.active_mean == pytest.approx((0.1 * 2 + 0.6 * 11 / 3) / 0.7)
    assert second.mean == pytest.approx(13 / 3)
    assert second.active_mean == pytest.approx(13 / 3)


def test_tokens_that_experts_were_fitted_to_are_said():
    def note(**changes):
        return words_of(make_run(**changes))

    # The text may be shorter than what was asked for.
    topped = note(fewest_tokens=40, unvisited=1)
    assert "fitted to 40 calibration tokens or more; 1 expert of 6 had fewer" in topped
    assert "1 of them none, and were also fitted to the tokens" in topped
    assert "fitted to 70 calibration tokens or more that are routed to it." in note(
        topped_up=0, fewest_tokens=70
    )
    # Without topping up, an expert that no token visits has nothing to be fitted to.
    plain = note(minimum_tokens=0, topped_up=0, added_tokens=0, fewest_tokens=0, unvisited=2)
    assert "No calibration token is routed to 2 experts of 6" in plain
    assert "rounded to nearest" in plain


@pytest.mark.parametrize("minimum", [0, 8])
def test_the_record_counts_what_candidates_were_made_of(minimum, tmp_path):
    loaded = wrap_model(tiny_moe("qwen3_next"))  # 16 experts, 4 of them for each of 6 tokens
    plan = make_plan(
        loaded.layout,
        model_linears(loaded.layout, loaded.model),
        widths=(3, 4),
        group_size=None,
        symmetric=True,
    )
    settings = CandidateSettings(sweeps=0, expert_tokens=minimum)
    backend = Compression(loaded, plan, tmp_path, settings=settings)
    tokens = tiny_tokens(0, 1, 6)
    text = CalibrationSet(
        tokens, torch.ones_like(tokens, dtype=torch.bool), ("random",), "random", 0, "calibration"
    )
    backend.candidates(text)
    backend.count_visits(text)
    problem = backend.problem(Budget.parse(bits="3"))
    found = _expert_widths(backend, problem.allocation([0] * len(plan.groups)))["expert_widths"]
    visits = torch.tensor([backend.visits.experts[layer] for layer in range(3)])
    assert found["unvisited"] == int((visits == 0).sum()) > 0
    assert found["minimum_tokens"] == minimum
    # Six tokens are all that there are.
    assert found["fewest_tokens"] == min(minimum, 6)
    assert found["added_tokens"] == (int((6 - visits).sum()) if minimum else 0)
    assert found["topped_up"] == (int((visits < 6).sum()) if minimum else 0)
    words = words_of(RunData("run", metrics={"expert_widths": found}))
    assert ("No calibration token is routed" in words) == (minimum == 0)


def test_loading_says_that_the_checkpoint_brings_its_code():
    run = make_run()
    export = {"path": "runs/x/model", "format": "compressed-tensors", "files": {"config.json": 1}}
    own = {**export, "files": {"config.json": 1, "modeling_unfused_experts.py": 2}}
    page = words_of(RunData("run", metrics={**run.metrics, "export": own}))
    assert "trust_remote_code=True" in page
    assert "builds them separately" in page
    # Experts of one width are stacked by stock transformers; pruned ones may still need code.
    stock = words_of(RunData("run", metrics={**run.metrics, "export": export}))
    assert "from_pretrained" in stock
    assert "trust_remote_code" not in stock
    dense = {**export, "format": "dense", "files": {"modeling_pruned_experts.py": 2}}
    page = words_of(RunData("run", metrics={**run.metrics, "export": dense}))
    assert "trust_remote_code=True" in page
    assert "different numbers of experts" in page


def test_nothing_is_drawn_without_experts_and_half_a_record_is_an_error():
    assert 'id="expert-widths"' not in page_of(RunData("run"))
    with pytest.raises(ReportError, match="needs layer, widths"):
        page_of(make_run(layers=[{"layer": 0}]))
    with pytest.raises(ReportError, match="1 with a frequency"):
        page_of(make_run(layers=[{"layer": 0, "widths": [[2, 2, 2]] * 2, "frequency": [1.0]}]))
