"""The page's parts: numbers, plots, the map of widths, the map of experts, the certificate's sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from decimal import Decimal, localcontext
from fractions import Fraction
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rco.report.certificate import checks
from rco.report.data import Evaluated, GroupWidth, MoeLayer, RunData, groups
from rco.report.figures import quality_against_bits, sensitivity
from rco.report.maps import expert_map, width_bands, width_shares
from rco.report.numbers import bytes_text, duration, exact, measured, percent, short, significant
from rco.report.result_tables import fold_names, group_table
from rco.report.svg import draw, spread
from rco.report.theme import level
from rco.report.usage import reproduce_command

finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


# -------------------------------------------------------------------------- numbers


@given(finite, st.integers(2, 8))
def test_significant_keeps_its_digits(value, digits):
    shown = float(significant(value, digits).replace(",", "").replace("−", "-"))
    assert math.isclose(shown, value, rel_tol=5.01 * 10.0**-digits)
    assert math.isclose(float(short(value, digits).replace(",", "").replace("−", "-")), shown)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (math.nan, "not a number"), (-math.inf, "−∞"), (0.0, "0"), (0.00012345, "0.0001234"),
     (9.9999e-5, "0.0001000"), (1234.5678, "1,235"), (3.2e-7, "3.200e-7"), (-2.5, "−2.500")],
)  # fmt: skip
def test_significant(value, shown):
    assert significant(value) == shown


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.18843, 0.0041, "0.1884 ± 0.0041"),
        (12345.6, 120.0, "12,346 ± 120"),
        (14.02, 0.2382, "14.02 ± 0.24"),
        (0.5, 0.0, "0.5000"),
        (0.5, None, "0.5000"),
        (0.5, math.nan, "0.5000"),
        (None, 0.1, "–"),
        (1e-12, 1e-14, "1.000e-12 ± 1.0e-14"),
    ],
)
def test_measured(value, error, shown):
    assert re.sub("<[^>]*>", "", measured(value, error)) == shown


@given(st.fractions(max_denominator=10**7))
def test_exact_is_exact(value):
    shown = exact(value).replace(",", "").replace("−", "-")
    assert Fraction(shown) == value
    if "." in shown:
        with localcontext(prec=len(shown)):
            assert Decimal(shown) == Decimal(value.numerator) / Decimal(value.denominator)


def test_spans_and_sizes():
    assert [bytes_text(n) for n in (0, 999, 1000, 3_101_234, 999_999, 2**63)] == [
        "0 bytes", "999 bytes", "1 kB", "3.1 MB", "1 MB", "9.22e+03 PB"]  # fmt: skip
    assert [duration(s) for s in (0.04, 9.96, 59.4, 59.6, 3599.6, 7261)] == [
        "0.0 s", "10 s", "59 s", "1 min 00 s", "1 h 00 min", "2 h 01 min"]  # fmt: skip
    assert percent(-0.0123) == "−1.2 %"


# --------------------------------------------------------------------------- plots


def drawn(points, **options):
    with draw("name", "title", "description", x_label="x", y_label="y", **options) as panel:
        panel.line(points, "c0")
        panel.dots(points, "c1", [f"dot {index}" for index in range(len(points))])
    return ElementTree.fromstring(panel.svg)


def ticks_of(root, labels):
    """Numbers beside an axis; the two labels of the axes are left out."""
    found = [element.text for element in root.iter("text")]
    return [text for text in found if text not in labels]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=5), st.booleans())
def test_plots_show_their_points_within_the_axes(points, log):
    if log:
        points = [(x, abs(y) + 1e-30) for x, y in points]
    root = drawn(points, y_log=log)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    dots = list(root.iter("use"))
    marks = [dot for dot in dots if dot.find("title") is not None]
    assert [dot.find("title").text for dot in marks] == [f"dot {index}" for index in range(len(points))]
    for dot in marks:
        assert 50 <= float(dot.get("x")) <= width - 10
        assert 25 <= float(dot.get("y")) <= height - 35
    # Larger values lie higher and farther right, as far as a picture can show it.
    for (one, first), (other, second) in itertools.combinations(zip(points, marks, strict=True), 2):
        for axis, sign, attribute in ((0, 1, "x"), (1, -1, "y")):
            order = (one[axis] > other[axis]) - (one[axis] < other[axis])
            assert sign * order * (float(first.get(attribute)) - float(second.get(attribute))) >= -0.2
    assert 3 <= len(ticks_of(root, ("x", "y"))) <= 20


def test_values_without_a_place_on_the_axis_leave_a_gap():
    values = [1.0, math.nan, 2.0, 3.0, math.inf, 0.0, 4.0, 5.0]
    root = drawn([(float(index), value) for index, value in enumerate(values)], y_log=True)
    titles = [title.text for title in root.iter("title")]
    assert titles == [f"dot {index}" for index in (0, 2, 3, 6, 7)]
    paths = [path.get("d") for path in root.iter("path") if path.get("stroke") == "var(--c0)"]
    (line,) = [path for path in paths if path]
    assert re.sub(r"[\d. ]", "", line) == "MMLML"  # the first stands alone, then 2 to 3 and 4 to 5


def test_long_lines_are_short_and_keep_their_peaks():
    points = [(float(step), math.sin(step) + (50 if step == 1234 else 0)) for step in range(5000)]
    with draw("name", "title", "description", x_label="x", y_label="y") as panel:
        panel.line(points, "c0")
        panel.axes.get_ylim()  # settles the limits
        top = panel.axes.transData.transform((0, 50 + math.sin(1234)))[1]
    (line,) = re.findall(r'<path d="([^"]*)"[^>]*stroke="var\(--c0\)"', panel.svg)
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", line)]
    assert min(heights) == pytest.approx(panel.size[1] - top, abs=0.2)
    assert len(line) < 60_000


def test_plots_are_the_same_whatever_the_settings_of_matplotlib():
    import matplotlib

    points = [(1.0, 2.0), (3.0, 4.0)]
    plain = ElementTree.tostring(drawn(points))
    with matplotlib.rc_context({"font.size": 40, "axes.grid": True, "svg.hashsalt": "other"}):
        before = dict(matplotlib.rcParams)
        assert ElementTree.tostring(drawn(points)) == plain
        assert dict(matplotlib.rcParams) == before


def test_names_of_any_characters_are_drawn_as_they_are():
    """Matplotlib warns about glyphs that its font lacks, and reads dollars as formulas."""
    names = ["模型 $x_1$", "two\nlines", "a <b> & 'c'"]
    rows = [
        (Evaluated(n, 2.0 + i, None, 0.1, None, None, None, None, None, {}, {}, False), n)
        for i, n in enumerate(names)
    ]
    root = ElementTree.fromstring(quality_against_bits(rows, "plot").svg)
    assert set(names) <= {text.text for text in root.iter("text")}
    assert quality_against_bits(rows[:1], "plot") is None


@given(st.lists(st.floats(0, 300), max_size=12))
def test_names_do_not_overlap(places):
    moved = sorted(spread(places, 15, 0, 300))
    assert all(after - before >= 15 - 1e-9 for before, after in itertools.pairwise(moved))
    assert all(0 <= place <= 300 for place in moved)


# --------------------------------------------------------------------- map of widths


def group(name: str, block: int | None, width: float, *members: str, parameters: int = 100) -> GroupWidth:
    kind = name.rpartition(".")[2]
    return GroupWidth(name, members or (name,), kind, block, parameters, width, f"{width:g}", {}, {})


def cells(groups):
    """Kind to (label, kinds spanned, whether tied), over one band."""
    (band,), _ = width_bands(groups)
    return {
        kind: [(s.cell.label, s.rows, s.cell.tied) if s.cell else None for s in spots]
        for kind, spots, _ in band.rows
    }


def test_ties_become_one_cell():
    groups = [
        group("m.0.q+k", 0, 3, "m.0.q", "m.0.k"),
        group("m.0.o", 0, 2),
        group("m.1.q+o", 1, 4, "m.1.q", "m.1.o"),  # not neighbours: drawn twice
        group("m.1.k", 1, 2),
    ]
    assert cells(groups) == {
        "q": [("3", 2, True), ("4", 1, True)],
        "k": [("2", 1, False)],
        "o": [("2", 1, False), ("4", 1, True)],
    }
    (band,), _ = width_bands(groups)
    assert band.rows[0][1][0].cell.title == "m.0.q+k: 3 bits, 100 weights (2 linears tied)"
    assert band.averages == [2.5, 3.0]  # a tied group counts once
    assert [average for _, _, average in band.rows] == [3.5, 2.5, 3.0]


def test_blocks_without_some_kind_have_a_gap():
    assert cells([group("m.0.q", 0, 2), group("m.1.k", 1, 3)]) == {
        "q": [("2", 1, False), None],
        "k": [None, ("3", 1, False)],
    }


def test_kinds_with_the_same_short_name_stay_apart():
    """GPT-2 has an attn.c_proj and an mlp.c_proj; a block's number may also occur elsewhere in a name."""
    found = cells(
        [group(f"h.{b}.{path}", b, 2) for b in (0, 1) for path in ("attn.c_proj", "mlp.c_proj", "c_fc")]
    )
    assert found == {kind: [("2", 1, False)] * 2 for kind in ("attn.c_proj", "mlp.c_proj", "c_fc")}


def test_experts_are_called_so():
    paths = ("mlp.experts.3.up_proj", "mlp.shared_expert.up_proj", "mlp.up_proj", "self_attn.q_proj")
    found = cells([group(f"layers.0.{path}", 0, 2) for path in paths])
    assert list(found) == ["experts.up_proj", "shared_expert.up_proj", "mlp.up_proj", "q_proj"]
    assert list(cells([group(f"layers.0.mlp.experts.{e}.w1", 0, 2) for e in range(2)])) == ["experts.w1"]


def test_experts_share_a_cell_with_their_average():
    groups = [
        group(f"l.0.experts.{e}.up", 0, width, parameters=size)
        for e, (width, size) in enumerate([(2, 300), (4, 100)])
    ]
    assert cells(groups) == {"experts.up": [("2.5", 1, False)]}
    (band,), _ = width_bands(groups)
    assert band.rows[0][1][0].cell.title == "2 groups: average 2.500 bits (1 × 2, 1 × 4)"


def test_outside_the_blocks_and_many_blocks():
    head = group("lm_head", None, 8)
    assert width_bands([head]) == ([], [head])
    bands, _ = width_bands([group(f"m.{b}.q", b, 2) for b in range(80)])
    assert [block for band in bands for block in band.blocks] == list(range(80))
    assert [band.last for band in bands] == [False, False, True]


def test_width_shares_add_up():
    shares = width_shares([group("a", 0, 2, parameters=600), group("b", 0, 3, parameters=400)])
    assert [share.words for share in shares] == [
        "2 bits: 60.0 % of the weights, 1 group",
        "3 bits: 40.0 % of the weights, 1 group",
    ]
    assert [(share.start, share.share) for share in shares] == [(0.0, 0.6), (0.6, 0.4)]
    assert width_shares([group("a", 0, 2, parameters=0)]) == []
    assert [level(width) for width in (0, 1, 2, 4.4, 8, 12, 13, 16)] == [0, 2, 2, 4, 8, 8, 16, 16]


def test_sensitivity_leaves_out_what_has_no_logarithm():
    rows = [dataclasses.replace(group(f"g{i}", 0, 2 + i % 2), sensitivity={"2": value, "3": 0.1}) for i, value in
            enumerate([0.5, 0.0, -0.1, 0.02])]  # fmt: skip
    (plot,), left_out = sensitivity(rows, "")
    assert re.findall("<title>([^<]*)</title>", plot.svg) == ["g0: 2 bits, 0.500", "g3: 3 bits, 0.0200"]
    assert left_out == 2
    assert sensitivity([group("a", 0, 2)], "") == ([], 0)


def test_options_with_names_have_their_predictions():
    """Formats of equal width are told apart; an integer grid is named by its width."""
    predicted = {"nvfp4-a4": 0.5, "4": 0.25, "fp8-dynamic": 0.125}
    rows = [
        {"name": f"g{i}", "width": width, "format": format, "parameters": 10, "sensitivity": predicted,
         "relative_error": {name: value / 10 for name, value in predicted.items()}}
        for i, (width, format) in enumerate([(4, "nvfp4-a4"), (4, "int4-g64"), (8, "fp8-dynamic")])
    ]  # fmt: skip
    found = groups(SimpleNamespace(metrics={"groups": rows}))
    shown = {column.title: list(column.cells) for column in group_table(found).columns}
    assert shown["Format"] == ["nvfp4-a4", "4", "fp8-dynamic"]
    assert shown["Predicted KL"] == ["0.500", "0.250", "0.125"]
    assert shown["Relative error"] == ["0.0500", "0.0250", "0.0125"]
    (plot,), left_out = sensitivity(found, "")
    assert "predicted KL as nvfp4-a4" in plot.svg
    assert left_out == 0
    plain = group_table([group("a", 0, 2)])
    assert {column.title: list(column.cells) for column in plain.columns}["Format"] == [None]


# -------------------------------------------------------------------- map of experts


def test_four_states_of_an_expert():
    layer = MoeLayer(3, 4, (0, 2), {"reap": (9.0, 5.0, 1.0, 0.0)})  # REAP would keep 0 and 1
    (row,) = expert_map([layer])
    assert [strip.colours for strip in row.strips] == [("kept",), ("lost",), ("gained",), ("pruned",)]
    assert row.strips[2].title == "Layer 3, expert 2: kept, reap 1.00"
    assert row.strips[1].title == "Layer 3, expert 1: pruned, reap 5.00"
    assert (row.note, row.share) == ("2", 0.5)
    (plain,) = expert_map([MoeLayer(0, 4, (0, 2), {})])
    assert [strip.colours for strip in plain.strips] == [("kept",), ("pruned",)] * 2


@given(st.integers(1, 600), st.integers(1, 3), st.data())
def test_every_expert_is_drawn_once(experts, layers, data):
    kept = [data.draw(st.sets(st.integers(0, experts - 1))) for _ in range(layers)]
    rows = expert_map([MoeLayer(i, experts, tuple(sorted(found)), {}) for i, found in enumerate(kept)])
    for row, found in zip(rows, kept, strict=True):
        states = [strip.colours[0] for strip in row.strips for _ in range(strip.experts)]
        assert states == ["kept" if expert in found else "pruned" for expert in range(experts)]
        large = layers * experts > 1024
        assert (row.title is not None) is large
        assert all((strip.title is None) is large for strip in row.strips)


# ----------------------------------------------------------------------- certificate


@pytest.mark.parametrize(
    ("tensors", "headers", "total", "holds"),
    [
        ({"a": 10, "b": 5}, None, 15, True),
        ({"a": 10, "b": 5}, 7, 22, True),
        ({"a": 10, "b": 5}, 7, 23, False),
        ({"a": 10, "b": 5}, None, 22, False),
        ({"a": 10, "b": 5}, 7, 15, True),
    ],
)
def test_add_up_is_said_only_when_true(tensors, headers, total, holds):
    run = RunData("run", {"export": {"tensors": tensors, "total_bytes": total}}, header_bytes=headers)
    (check,) = checks(run)
    assert check.holds is holds
    assert ("add up" in check.words) is holds


@given(st.integers(0, 10**15), st.integers(1, 10**15))
def test_within_budget_is_said_only_when_true(used, allowed):
    run = RunData("run", {"budget": {"used_units": used, "budget_units": allowed, "unit": "bytes"}})
    (check,) = checks(run)
    assert check.holds is (used <= allowed)
    run = RunData("run", {"certificate": {"used": used, "allowed": f"{allowed}/3"}})
    (check,) = checks(run)
    assert check.holds is (3 * used <= allowed)


def test_the_cost_is_recomputed(make_quantized):
    run = make_quantized(blocks=1)
    assert all(check.holds for check in checks(run))
    lie = dataclasses.replace(run.result, cost=run.result.cost - 1)
    assert [c.words for c in checks(dataclasses.replace(run, result=lie)) if not c.holds] == [
        f"The search recorded a cost of {run.result.cost - 1}; the allocation costs {run.result.cost}."
    ]
    greedy = dataclasses.replace(run.result, allocation=run.problem.allocation([6] * run.problem.num_groups))
    assert any(not check.holds for check in checks(dataclasses.replace(run, result=greedy)))


@given(
    st.dictionaries(
        st.from_regex(r"m\.[0-9]{1,2}\.e\.[0-9]\.[ab]", fullmatch=True), st.integers(0, 99), max_size=60
    ),
    st.integers(1, 30),
)
def test_folding_keeps_sums_and_counts(sizes, most):
    folded, changed = fold_names(sizes, most)
    assert sum(size for _, size in folded.values()) == sum(sizes.values())
    assert sum(number for number, _ in folded.values()) == len(sizes)
    assert changed == (len(sizes) > most)
    assert len(folded) <= max(most, 2)  # the kinds a and b are never folded into one


# ----------------------------------------------------------------------------- usage


def test_commands_survive_a_shell():
    config = {
        "model": "a b",
        "bits": "2.5",
        "lock": ["x=8", "$(rm)=4"],
        "tau": [1.0, 0.1],
        "resume": False,
        "out": None,
    }
    run = RunData("run", {"kind": "quantization"}, config=config)
    assert " ".join(reproduce_command(run).replace("\\\n", " ").split()) == (
        "rco quantize 'a b' --bits 2.5 --lock x=8 --lock '$(rm)=4' --tau 1.0 0.1 --no-resume"
    )
    recorded = dataclasses.replace(run, metrics={"command": ["rco", "quantize", "a b"]})
    assert reproduce_command(recorded) == "rco quantize 'a b'"
    assert reproduce_command(RunData("run")) is None
