"""The page's parts: numbers, scales, the map of widths, the map of experts, the certificate's sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rco.report.bits import bit_map, level, width_shares
from rco.report.certificate import checks
from rco.report.charts import Scale, spread, thin
from rco.report.data import GroupWidth, MoeLayer, RunData
from rco.report.experts import expert_map
from rco.report.figures import sensitivity
from rco.report.markup import Markup, element, fragment, text
from rco.report.numbers import bytes_text, duration, exact, measured, percent, short, significant
from rco.report.tables import fold_names
from rco.report.usage import reproduce_command

finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


# --------------------------------------------------------------------------- markup


def test_elements_escape_all_but_markup():
    made = element("p", "<b>", Markup("<i>x</i>"), None, ["&", 3], class_="a\"b'", hidden=True, id=None)
    assert made == '<p class="a&quot;b&#x27;" hidden>&lt;b&gt;<i>x</i>&amp;3</p>'
    assert isinstance(fragment("a"), Markup)
    assert element("path", d="M0 0") == '<path d="M0 0"/>'


@given(st.text(st.characters()))
def test_text_has_no_markup_and_encodes(words):
    safe = text(words)
    assert not re.search("[<>\"']", safe)
    safe.encode("utf-8")


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
        assert Decimal(shown) == Decimal(value.numerator) / Decimal(value.denominator)


def test_spans_and_sizes():
    assert [bytes_text(n) for n in (0, 999, 1000, 3_101_234, 999_999, 2**63)] == [
        "0 bytes", "999 bytes", "1 kB", "3.1 MB", "1 MB", "9.22e+03 PB"]  # fmt: skip
    assert [duration(s) for s in (0.04, 9.96, 59.4, 59.6, 3599.6, 7261)] == [
        "0.0 s", "10 s", "59 s", "1 min 00 s", "1 h 00 min", "2 h 01 min"]  # fmt: skip
    assert percent(-0.0123) == "−1.2 %"


# --------------------------------------------------------------------------- charts


@given(st.lists(finite, min_size=1, max_size=5), st.booleans())
def test_scales_show_their_values(values, log):
    if log:
        values = [abs(value) + 1e-30 for value in values]
    scale = Scale(values, log=log)
    scale.fit(50, 450)
    for value in values:
        assert 50 - 1e-6 <= scale(value) <= 450 + 1e-6
    ticks = scale.ticks()
    assert len(ticks) <= 9
    assert ticks == sorted(set(ticks))
    assert all(49 <= scale(tick) <= 451 for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(1, 60), (0, 1), (2.0, 2.1), (1e-8, 1e-5)])
def test_linear_ticks_are_round_and_enough(low, high):
    ticks = Scale([low, high]).ticks()
    assert len(ticks) >= 3
    step = ticks[1] - ticks[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


@given(st.lists(st.floats(allow_nan=True), max_size=3000))
def test_thin_keeps_the_peaks(values):
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thin(points, limit=100)
    assert len(kept) <= 105
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    numbers = [y for _, y in points if math.isfinite(y)]
    if numbers:
        shown = [y for _, y in kept if math.isfinite(y)]
        assert (min(shown), max(shown)) == (min(numbers), max(numbers))


@given(st.lists(st.floats(0, 300), max_size=12))
def test_names_do_not_overlap(places):
    moved = sorted(spread(places, 15, 0, 300))
    assert all(after - before >= 15 - 1e-9 for before, after in itertools.pairwise(moved))
    assert all(0 <= place <= 300 for place in moved)


# --------------------------------------------------------------------- map of widths


def group(name: str, block: int | None, width: float, *members: str, parameters: int = 100) -> GroupWidth:
    return GroupWidth(name, members or (name,), name.rpartition(".")[2], block, parameters, width, {}, {})


def test_ties_become_one_cell():
    drawing = bit_map(
        [
            group("m.0.q+k", 0, 3, "m.0.q", "m.0.k"),
            group("m.0.o", 0, 2),
            group("m.1.q+o", 1, 4, "m.1.q", "m.1.o"),  # not neighbours: drawn twice
            group("m.1.k", 1, 2),
        ]
    )
    cells = re.findall(r'<rect [^>]*height="(\d+)"[^>]*class="cell (\w+)( tied)?"', drawing)
    assert sorted(cells) == sorted(
        [
            ("62", "w3", " tied"),
            ("30", "w2", ""),
            ("30", "w4", " tied"),
            ("30", "w2", ""),
            ("30", "w4", " tied"),
        ]
    )
    assert "m.0.q+k: 3 bits, 100 weights (2 linears tied)" in drawing


def test_kinds_with_the_same_short_name_stay_apart():
    """GPT-2 has an attn.c_proj and an mlp.c_proj; a block's number may also occur elsewhere in a name."""
    drawing = bit_map(
        [group(f"h.{b}.{path}", b, 2) for b in (0, 1) for path in ("attn.c_proj", "mlp.c_proj", "c_fc")]
    )
    assert re.findall(r"<title>([\w.]+)</title>[\w.]+</text>", drawing) == [
        "attn.c_proj",
        "mlp.c_proj",
        "c_fc",
    ]
    assert drawing.count('class="cell w2"') == 6


def test_experts_are_called_so():
    paths = ("mlp.experts.3.up_proj", "mlp.shared_expert.up_proj", "mlp.up_proj", "self_attn.q_proj")
    drawing = bit_map([group(f"layers.0.{path}", 0, 2) for path in paths])
    names = re.findall(r"<title>([\w.]+)</title>[\w.…]+</text>", drawing)
    assert names == ["experts.up_proj", "shared_expert.up_proj", "mlp.up_proj", "q_proj"]
    alone = bit_map([group(f"layers.0.mlp.experts.{e}.w1", 0, 2) for e in range(2)])
    assert re.findall(r"<title>([\w.]+)</title>[\w.]+</text>", alone) == ["experts.w1"]


def test_experts_share_a_cell_with_their_average():
    groups = [
        group(f"l.0.experts.{e}.up", 0, width, parameters=size)
        for e, (width, size) in enumerate([(2, 300), (4, 100)])
    ]
    drawing = bit_map(groups)
    assert drawing.count("<rect") == 1
    assert "2 groups: average 2.500 bits (1 × 2, 1 × 4)" in drawing


def test_outside_the_blocks_and_many_blocks():
    drawing = bit_map([group("lm_head", None, 8)])
    assert "lm_head" in drawing
    assert "<svg" not in drawing
    assert bit_map([group(f"m.{b}.q", b, 2) for b in range(80)]).count("<svg") == 3


def test_width_shares_add_up():
    bar = width_shares([group("a", 0, 2, parameters=600), group("b", 0, 3, parameters=400)])
    assert "2 bits: 60.0 % of the weights, 1 group" in bar
    assert "3 bits: 40.0 % of the weights, 1 group" in bar
    assert [level(width) for width in (1, 2, 4.4, 8, 12, 13, 16)] == [
        "w2",
        "w2",
        "w4",
        "w8",
        "w8",
        "w16",
        "w16",
    ]


def test_sensitivity_leaves_out_what_has_no_logarithm():
    rows = [dataclasses.replace(group(f"g{i}", 0, 2 + i % 2), sensitivity={2: value, 3: 0.1}) for i, value in
            enumerate([0.5, 0.0, -0.1, 0.02])]  # fmt: skip
    drawing = sensitivity(rows)
    assert drawing.count("<circle") == 2
    assert "2 groups without a positive prediction" in drawing
    assert sensitivity([group("a", 0, 2)]) is None


# -------------------------------------------------------------------- map of experts


def test_four_states_of_an_expert():
    layer = MoeLayer(3, 4, (0, 2), {"reap": (9.0, 5.0, 1.0, 0.0)})  # REAP would keep 0 and 1
    drawing = expert_map([layer])
    for state in ("kept", "gained", "lost", "pruned"):
        (path,) = re.findall(rf'<path d="([^"]*)" class="cell {state}"', drawing)
        assert path.count("M") == 1
    assert "Layer 3, expert 2: kept, reap 1.00" in drawing
    assert "Layer 3, expert 1: pruned, reap 5.00" in drawing
    plain = expert_map([MoeLayer(0, 4, (0, 2), {})])
    assert 'class="cell gained"' not in plain


@given(st.integers(1, 600), st.data())
def test_every_expert_is_drawn_once(experts, data):
    kept = data.draw(st.sets(st.integers(0, experts - 1)))
    drawing = expert_map([MoeLayer(0, experts, tuple(sorted(kept)), {})])
    widths = {
        state: sum(float(w) for w in re.findall(r"h([\d.]+)v", path))
        for path, state in re.findall(r'<path d="([^"]*)" class="cell (kept|pruned)"', drawing)
    }
    wide = min(22.0, max(1.25, 800 / experts))
    gap = 1.5 if wide >= 5 else 0.0
    for state, number in (("kept", len(kept)), ("pruned", experts - len(kept))):
        assert widths.get(state, 0.0) == pytest.approx(number * (wide - gap), rel=1e-2)


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
