"""The ablation sweeps as data: what varies, how runs become tables, and what is recommended."""

import dataclasses
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from ablation_report import COLUMNS, ablation_markdown, recommend, summarize, write_ablations
from ablations import SWEEPS, Loop, make_sweeps

CENTRE = Loop(steps=40, samples=4, lr=0.1, tau=0.1, sequences=96)
VARIES = {
    "samples": {"samples"},
    "steps": {"steps"},
    "equal-compute": {"samples", "steps"},
    "temperature": {"tau"},
    "learning-rate": {"lr"},
    "antithetic": {"antithetic"},
    "seeds": set(),
    "grouping": {"grouped", "sequences"},
    "calibration": {"sequences"},
}


@pytest.mark.parametrize("quick", [False, True])
def test_a_sweep_varies_its_own_setting_and_passes_through_the_centre(quick):
    sweeps = make_sweeps(CENTRE, 3, quick=quick)
    assert [sweep.name for sweep in sweeps] == list(SWEEPS) == list(VARIES)
    for sweep in sweeps:
        loops = [point.loop for point in sweep.points]
        assert CENTRE in loops, sweep.name
        assert len({(p.loop, p.seeds) for p in sweep.points}) == len(sweep.points) > 1, sweep.name
        changed = {
            field.name
            for loop in loops
            for field in dataclasses.fields(Loop)
            if getattr(loop, field.name) != getattr(CENTRE, field.name)
        }
        assert changed == VARIES[sweep.name], sweep.name
        if sweep.name == "equal-compute":
            assert {loop.steps * loop.samples for loop in loops} == {160}


def test_values_can_be_given_and_the_centre_is_always_among_them():
    names = [
        "temperature=0.05,0.001",
        "samples=16,1",
        "equal-compute=8x100,32x50",
        "antithetic",
        "calibration=24",
    ]
    sweeps = {sweep.name: sweep for sweep in make_sweeps(CENTRE, 2, names=names)}
    assert list(sweeps) == ["samples", "equal-compute", "temperature", "antithetic", "calibration"]
    assert [point.label for point in sweeps["samples"].points] == ["1", "4", "16"]
    assert [point.loop.samples for point in sweeps["samples"].points] == [1, 4, 16]
    assert [point.loop.tau for point in sweeps["temperature"].points] == [0.1, 0.05, 0.001]
    pairs = [(point.loop.samples, point.loop.steps) for point in sweeps["equal-compute"].points]
    assert pairs == [(4, 40), (8, 100), (32, 50)]
    assert [point.loop.sequences for point in sweeps["calibration"].points] == [24, 96]
    for sweep in sweeps.values():
        assert CENTRE in [point.loop for point in sweep.points]
        assert {point.seeds for point in sweep.points} == {(0, 1)}


def test_keys_of_files_tell_loops_apart():
    loops = {point.loop for sweep in make_sweeps(CENTRE, 3) for point in sweep.points}
    assert len({loop.key for loop in loops}) == len(loops)


def test_seeds_are_those_asked_for_and_five_where_their_spread_is_the_question():
    sweeps = {sweep.name: sweep for sweep in make_sweeps(CENTRE, 2)}
    assert {point.seeds for point in sweeps["steps"].points} == {(0, 1)}
    assert [point.seeds for point in sweeps["seeds"].points] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({}, ["sampels"], "Unknown sweeps sampels"),
        ({}, ["samples=many"], "take a list of numbers"),
        ({}, ["grouping=1,2"], "the other sweeps take no values"),
        ({}, ["equal-compute=8"], "as in equal-compute=8x100"),
        ({}, ["learning-rate=0"], "must be positive"),
        ({}, ["calibration=500"], "raise `sequences`"),
        ({"steps": 6}, [], "multiples of 4"),
        ({"samples": 2}, [], "multiples of 4"),
        ({"sequences": 8}, [], "16 calibration sequences"),
    ],
)
def test_what_cannot_be_swept_is_refused(changes, names, message):
    with pytest.raises(ValueError, match=message):
        make_sweeps(dataclasses.replace(CENTRE, **changes), 1, names=names)


def test_a_model_without_fused_linears_has_no_grouping():
    assert "grouping" not in [sweep.name for sweep in make_sweeps(CENTRE, 1, can_group=False)]
    with pytest.raises(ValueError, match="grouping"):
        make_sweeps(CENTRE, 1, names=["grouping"], can_group=False)


def made_runs(sweeps, kl):
    """Runs whose KL is ``kl(loop, seed, column)``."""
    runs = {}
    for sweep in sweeps:
        for point in sweep.points:
            for seed in point.seeds:
                for columns in (("printed", "spent"), ("search",)):
                    runs[point.loop.key, seed, columns] = {
                        "key": point.loop.key,
                        "loop": point.loop.to_dict(),
                        "seed": seed,
                        "measured": {
                            column: {
                                "kl": kl(point.loop, seed, column),
                                "perplexity": 10.0,
                                "bits": 2.5,
                                "widths": [2, 3, 2 + seed % 2],
                            }
                            for column in columns
                        },
                        "tokens": 3 * point.loop.steps * point.loop.samples,
                        "seconds": 1.0,
                        "chosen_from": "final",
                        "selection_loss": None,
                    }
    return list(runs.values())


def made_record(sweeps, runs):
    described = summarize(sweeps, runs)
    return {
        "settings": {
            "model": "tiny-llama", "bits": "2.5", "widths": "2,3,4", "sequences": 96, "evaluation": 48,
            "length": 256, "data": "builtin", "device": "cpu",
        },
        "environment": {"cpu": "a processor", "torch": "2", "gpu": []},
        "command": "python benchmarks/ablations.py",
        "centre": CENTRE.to_dict(),
        "linears": 3,
        "core_minutes": 1.0,
        "references": {"uniform interpolation": {"kl": 0.5, "perplexity": 20.0}},
        "sweeps": described,
        "recommended": recommend(described, CENTRE),
    }  # fmt: skip


def test_rows_are_means_and_deviations_over_their_seeds():
    sweeps = make_sweeps(CENTRE, 3)
    rng = np.random.default_rng(0)
    drawn = {}

    def kl(loop, seed, column):
        return drawn.setdefault((loop, seed, column), float(rng.random()))

    for sweep, described in zip(sweeps, summarize(sweeps, made_runs(sweeps, kl)), strict=True):
        for point, row in zip(sweep.points, described["rows"], strict=True):
            for column in COLUMNS:
                values = [kl(point.loop, seed, column) for seed in point.seeds]
                assert row[column]["kl"]["mean"] == pytest.approx(np.mean(values), rel=1e-12)
                expected = np.std(values, ddof=1) if len(values) > 1 else 0.0
                assert row[column]["kl"]["std"] == pytest.approx(expected, rel=1e-9)
        if sweep.name == "seeds":
            assert described["agreement"]["search"] == {"linears": 3, "same": 2}


def test_the_best_value_is_recommended_with_those_that_noise_hides():
    sweeps = make_sweeps(CENTRE, 3, names=["temperature", "grouping"])

    def kl(loop, seed, column):
        # 0.03 is best, 0.1 within the noise of +-0.01, the others far away; grouping always hurts.
        base = {0.3: 0.4, 0.1: 0.201, 0.03: 0.2, 0.01: 0.3}[loop.tau] + 0.1 * loop.grouped
        return base + 0.01 * (seed - 1)

    advice = {e["setting"]: e for e in recommend(summarize(sweeps, made_runs(sweeps, kl)), CENTRE)}
    assert advice["tau"]["search"] == {"best": 0.03, "as_good": [0.1, 0.03]}
    assert advice["tau"]["default"] == 0.1
    assert advice["grouped"]["search"] == {"best": False, "as_good": [False]}
    assert advice["grouped"]["tested"] == [False, True]


def test_files_hold_every_sweep(tmp_path):
    sweeps = make_sweeps(CENTRE, 2)
    record = made_record(sweeps, made_runs(sweeps, lambda loop, seed, column: 0.2 + 0.01 * seed))
    written = write_ablations(tmp_path, record)
    for sweep in sweeps:
        picture = tmp_path / f"ablation_{sweep.name}.png"
        assert picture in written
        assert picture.read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(tmp_path / f"ablation_{sweep.name}.svg")
    text = (tmp_path / "ablations.md").read_text()
    for sweep in sweeps:
        assert f"## {sweep.title}" in text
    assert "0.2050 ± 0.0071" in text  # mean and deviation of 0.20 and 0.21
    assert "2 of 3 linears get the same width" in text
    assert "| lowest to highest mean, a width per linear | 0.2050 to 0.2050 |" in text
    assert (
        "| standard deviation over seeds, centre of the sweeps | 0.0158 |" in text
    )  # of 0.20, 0.21 ... 0.24
    assert text == ablation_markdown(record, written)
