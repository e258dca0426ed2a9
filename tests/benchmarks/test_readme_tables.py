"""The tables that documents show are those of the measurements, in the order they claim."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from ablation_report import ablation_markdown

from rco.pipeline.compare_tables import summarise

ROOT = Path(__file__).parents[2]
KL = {
    # method: budget -> KL of each seed
    "fisher": {"2.25": [0.25, 0.27], "2.5": [0.16, 0.16]},
    "rco": {"2.25": [0.23, 0.25], "2.5": [0.14, 0.16]},
    "late": {"2.25": [0.10]},
    "uniform-fill": {"2.25": [0.40], "2.5": [0.30]},
}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The script, with results and documents of its own."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in module.DOCUMENTS:
        (tmp_path / name).write_text("before\n<!-- measured: begin -->old<!-- measured: end -->\nafter\n")
    return module


@pytest.fixture
def comparison(tmp_path):
    entries = [
        {
            "label": method, "budget": budget, "seed": seed, "kl": kl, "perplexity": 20 + kl, "bits": float(budget),
            "bits_exact": {"2.25": "9/4", "2.5": "5/2"}[budget], "tokens": 1000 * len(method),
            "forward_tokens": 1, "backward_tokens": 2, "seconds": 3.0, "by_domain": {},
            "candidates": {"final": kl, "prior": 0.2, "refined": 0.01} if method == "rco" else {"uniform": 1.0},
        }
        for method, budgets in KL.items()
        for budget, seeds in budgets.items()
        for seed, kl in enumerate(seeds)
    ]  # fmt: skip
    full = {"perplexity": 19.0}
    about = {"title": "a title", "tokens": 5000, "seconds": None, "full_model": full, "failed": {"x": "why"}}
    machine = {"time": "2026-01-02T03:04:05Z", "cpu": "a CPU", "cpu_count": 2, "gpu": [], "torch": "2"}
    record = {**about, "environment": machine, "rows": summarise(entries, full), "entries": entries}
    (tmp_path / "compare_quantize.json").write_text(json.dumps(record))


def cells(text, heading):
    """The rows of the table with that heading, split at the bars."""
    lines = text[text.index(heading) :].splitlines()
    shown = [line for line in lines[2 : next(i for i, line in enumerate(lines) if not line)]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]


def test_methods_are_rows_best_first_and_budgets_are_columns(tables, comparison, tmp_path):
    tables.main()
    text = (tmp_path / "docs" / "results.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert cells(text, "| method |") == [
        ["rco", "0.2400 ± 0.0141", "0.1500 ± 0.0141", "3,000"],
        ["fisher", "0.2600 ± 0.0141", "0.1600 ± 0.0000", "6,000"],
        ["uniform-fill", "0.4000", "0.3000", "12,000"],
        ["late", "0.1000", "", "4,000"],
    ]
    assert "the proxy knapsack (`fisher`): -7.7 % at 2.25, -6.2 % at 2.5" in text
    assert "fisher-pooled" not in text  # it was not measured
    assert "`rco compare quantize tiny-llama --bits 2.25,2.5 --seeds 2`" in text


def test_the_readme_shows_at_most_six_methods_in_plain_words(tables, comparison, tmp_path):
    tables.main()
    assert cells((tmp_path / "README.md").read_text(), "| method |") == [
        ["RCO", "0.2400", "0.1500"],
        ["Fisher information of each layer, then an exact knapsack", "0.2600", "0.1600"],
        ["the same width everywhere, the rest spent from the first layer on", "0.4000", "0.3000"],
    ]
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 130
    assert text.count("|---|") == 1
    assert len(cells(text, "| method |")) <= 6


def test_the_long_tables_are_those_of_the_command(tables, comparison, tmp_path):
    tables.main()
    text = (tmp_path / "docs" / "comparison.md").read_text()
    assert "a title" not in text
    assert [row[0] for row in cells(text[text.index("## 2.25") :], "| method |")] == [
        "late", "rco", "fisher", "uniform-fill",
    ]  # fmt: skip
    best = cells(text[text.index("## 2.5") :], "| method |")[0]
    assert best == ["rco", "0.1500 ± 0.0141", "20.150 ± 0.014", "2.5", "3,000", "3 ± 0", "2"]
    assert "* x: why" in text
    # One standard error of the difference: sqrt(2) times 0.0141 / sqrt(2) of two seeds each; `late` has one seed.
    compared = cells(text, "| bits | best method other than RCO")
    assert compared == [
        ["2.25", "`late`", "-0.14000 ± 0.01000", "", ""],
        ["2.5", "`fisher`", "+0.01000 ± 0.01000", "", ""],
    ]


def test_candidates_are_compared_with_the_prior(tables, comparison, tmp_path):
    tables.main()
    text = (tmp_path / "docs" / "what_helped.md").read_text()
    # Losses of 0.23, 0.25, 0.14 and 0.16 against 0.2 each; what exchanges made of them does not count.
    assert cells(text, "| search | candidate |") == [
        ["`rco`", "final", "-2.50 ± 26.61", "2 of 4"],
        ["`rco`", "prior", "+0.00 ± 0.00", "2 of 4"],
    ]


def test_without_results_nothing_is_shown(tables, tmp_path):
    tables.main()
    for name in tables.DOCUMENTS:
        text = (tmp_path / name).read_text()
        assert re.fullmatch(r"before\n<!-- measured: begin -->\s*<!-- measured: end -->\nafter\n", text)


def test_documents_are_as_the_results_make_them(tables, tmp_path, monkeypatch):
    """Nobody has typed a figure, or forgotten to run the script."""
    monkeypatch.setattr(tables, "RESULTS", ROOT / "benchmarks" / "results")
    for name in tables.DOCUMENTS:
        (tmp_path / name).write_text((ROOT / name).read_text())
    tables.main()
    for name in tables.DOCUMENTS:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), (
            f"run benchmarks/readme_tables.py ({name})"
        )


def test_the_ablation_report_is_as_the_results_make_it():
    record = json.loads((ROOT / "benchmarks" / "results" / "ablations.json").read_text())
    folder = ROOT / "docs" / "ablations"
    expected = ablation_markdown(record, sorted(folder.glob("*.png")))
    assert (folder / "ablations.md").read_text() == expected


@pytest.fixture
def manifold_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("manifold_value")


def manifold_runs(script):
    """Two seeds at two budgets; a penalty that is 0.01 above RCO unless the budget is spent."""
    return [
        {
            "bits": bits, "method": method, "start": "zeros", "seed": seed, "settings": {}, "violation": 0.0,
            "ends": {
                end: {
                    "kl": 0.1 + 0.02 * seed + (0.01 if (method, end) == ("penalty", "printed") else 0.0),
                    "perplexity": 20.0,
                    "bits": float(bits),
                }
                for end in script.ENDS
            },
        }
        for bits in ("2.5", "10")
        for method in ("penalty", "rco-plain")
        for seed in (0, 1)
    ]  # fmt: skip


def test_the_manifold_is_compared_seed_by_seed_and_end_by_end(tables, manifold_script, tmp_path):
    rows = manifold_script.table_of(manifold_runs(manifold_script))
    above = {(row["end"], row["bits"]): row for row in rows if row["method"] == "penalty"}
    for (end, _), row in above.items():
        assert row["above_rco"] == pytest.approx(0.01 if end == "printed" else 0.0)
        assert row["above_rco_error"] == pytest.approx(0.0)  # seeds differ, and pairs do not
        assert row["kl_error"] == pytest.approx(0.01)
    ratios = manifold_script.ratios_of(manifold_runs(manifold_script))
    (printed,) = (row for row in ratios if row["end"] == "printed")
    assert printed["ratio"] == pytest.approx((0.11 / 0.1 * 0.13 / 0.12) ** 0.5)
    assert (printed["above"], printed["pairs"]) == (4, 4)
    machine = {"time": "2026-01-02T03:04:05Z", "cpu": "a CPU", "gpu": ["a GPU"], "torch": "2"}
    tuning = [
        {"method": "penalty", "settings": {"rho": rho}, "loss": 1 / rho, "runs": 4} for rho in (1.0, 2.0)
    ]
    record = {
        "settings": {"model": "m", "steps": 3, "samples": 2}, "environments": [machine], "seeds": [0, 1],
        "tuning": tuning, "rows": rows, "ratios": ratios,
    }  # fmt: skip
    (tmp_path / "manifold_value.json").write_text(json.dumps(record))
    tables.main()
    text = (tmp_path / "docs" / "manifold_value.md").read_text()
    assert "`penalty`: rho 2; best of 2 settings" in text
    assert cells(text, "| ending | method | 2.5 bits | 10 bits | all budgets |")[0] == [
        "printed", "`penalty`", "+0.01000 ± 0.00000", "+0.01000 ± 0.00000", "+9.2 ± 0.8 %", "4 of 4",
    ]  # fmt: skip
    shown = cells(text, "| ending | method | 2.5 bits | 10 bits |\n")
    assert [row[0] for row in shown] == [end for end in manifold_script.ENDS for _ in range(2)]
    assert shown[0] == [
        "printed", "`rco-plain`", "0.1100 ± 0.0100 / 20.000 / 2.5000", "0.1100 ± 0.0100 / 20.000 / 10.0000",
    ]  # fmt: skip


def test_settings_are_the_best_on_average_and_only_of_a_complete_grid(manifold_script, tmp_path):
    def line(method, own, bits, loss):
        entry = {"method": method, "settings": own, "bits": bits, "seed": 1000, "selection_loss": loss}
        return json.dumps({"key": [bits, method, str(own), 1000], "entry": entry}) + "\n"

    path = tmp_path / "tune.jsonl"
    header = json.dumps({"settings": {}, "environment": {}}) + "\n"
    lists = {"penalty": ([0.1, 0.9], [0.2, 0.2]), "augmented-lagrangian": ([0.3, 0.3], [0.1, 2.0])}
    lines = [
        line(method, {"rho": float(rho)}, bits, loss)
        for method, losses in lists.items()
        for rho, pair in enumerate(losses)
        for bits, loss in zip(("2.5", "3.0"), pair, strict=True)
    ]
    path.write_text(header + "".join(lines))
    assert manifold_script.tuned(path) == {"penalty": {"rho": 1.0}, "augmented-lagrangian": {"rho": 0.0}}
    assert manifold_script.tuned(None) == {}
    path.write_text(header + "".join(lines[1:]))
    with pytest.raises(SystemExit, match="not complete"):
        manifold_script.tuned(path)


def test_expert_domains_show_means_best_values_and_what_nonuniform_layers_save(tables, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("expert_domains")
    general = script.GENERAL.split(",")
    lines = {}
    for seed in (0, 1):
        for experts, calibration, allocation, kl in (
            ("0", "coding", "full", 0.0),
            ("0.25", "coding", "uniform", 0.4),
            ("0.25", "coding", "nonuniform", 0.1),
        ):
            domains = {name: {"kl": kl, "perplexity": 8.0} for name in general[1:]}
            domains[general[0]] = {"kl": kl + 0.6, "perplexity": 1.0}
            domains[script.CODING] = {"kl": kl + 0.02 * seed, "perplexity": 4.0}
            entry = {**script.by_kind(domains), "tasks": {"quiz": 0.5 + kl}}
            lines["m", experts, calibration, allocation, seed] = {"entry": entry}
    table = script.table_of(lines)
    uniform = next(row for row in table if row["allocation"] == "uniform")
    assert uniform["kl_coding"] == pytest.approx(0.41)
    assert uniform["kl_coding_std"] == pytest.approx(0.02 / 2**0.5)
    assert uniform["kl_general"] == pytest.approx(0.5)
    assert uniform["perplexity_general"] == pytest.approx(8 ** (5 / 6))
    machine = {"time": "2026-01-02T03:04:05Z", "cpu": "a CPU", "gpu": [], "torch": "2"}
    settings = {"coding": "c", "general": "a,b", "evaluation": 3, "length": 2}
    record = {
        "command": "x",
        "settings": settings,
        "environments": [machine],
        "seeds": [0, 1],
        "table": table,
    }
    (tmp_path / "expert_domains.json").write_text(json.dumps(record))
    tables.main()
    text = (tmp_path / "docs" / "expert_pruning.md").read_text()
    shown = cells(text, "| pruned | calibration | allocation |")
    assert [row[:3] for row in shown] == [
        ["none", "", "full model"], ["25 %", "coding", "nonuniform"], ["25 %", "coding", "uniform"],
    ]  # fmt: skip
    assert shown[1][3] == "**0.1100 ± 0.0141**"
    assert shown[2][3] == "0.4100 ± 0.0141"
    assert shown[2][7] == "**0.900 ± 0.000**"  # of accuracies the highest is best
    assert "nonuniform has 0.27 times the KL of uniform on coding, 0.40 times on general text" in text
