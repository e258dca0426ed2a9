"""The benchmark of two budgets: its table is what the command line reads, and its figure shows every search."""

from fractions import Fraction

import bytes_and_time

from rco.compression.second_budget import SecondBudget


def test_the_table_is_read_as_it_was_written(tmp_path):
    costs = {("q_proj", "original"): Fraction(123, 10**6), ("q_proj", "fp8-dynamic"): Fraction(7, 10**7)}
    path = tmp_path / "costs.csv"
    bytes_and_time.write_table(path, costs)
    assert bytes_and_time.read_table(path) == costs
    assert SecondBudget.parse(None, path, "1").table == costs


def test_every_search_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(bytes_and_time, "FIGURES", tmp_path)
    rows = [
        {"size": size, "milliseconds": time, "kl": 1 / size / time, "bytes": size}
        for size in (80_000_000, 100_000_000)
        for time in (0.5, 0.6, 0.8)
    ]
    uniform = {
        "original": {"milliseconds": 1.0, "kl": 0.0, "bytes": 200_000_000},
        "fp8-dynamic": {"milliseconds": 0.5, "kl": 0.1, "bytes": 100_000_000},
    }
    report = {"model": "some/model", "tokens_of_products": 64, "searches": rows, "uniform": uniform}
    bytes_and_time.draw(report)
    text = (tmp_path / "bytes_and_time.svg").read_text()
    assert "searched, 80.0 MB" in text
    assert "searched, 100.0 MB" in text
    assert "fp8-dynamic, 100.0 MB" in text
