"""``rco quantize`` on a mixture-of-experts model: budgets, report, certificate, checkpoint."""

import json

import pytest

from rco.cli import main

QUICK = [
    "--sequences", "4", "--sensitivity", "2", "--selection", "2", "--evaluation", "2", "--length", "48",
    "--steps", "2", "--samples", "1", "--refine", "2", "--widths", "2,3,4", "--method", "rtn", "--clip", "minmax",
    "--quiet",
]  # fmt: skip


def quantize(folder, *arguments):
    assert main(["quantize", "tiny-moe", "--out", str(folder), *arguments, *QUICK]) == 0
    return json.loads((folder / "metrics.json").read_text()), (folder / "report.html").read_text()


@pytest.mark.slow
def test_widths_and_pruning_within_bytes(tmp_path):
    metrics, page = quantize(tmp_path / "run", "--size", "6.6MB", "--allow-prune")
    written = sum(path.stat().st_size for path in (tmp_path / "run" / "model").glob("*.safetensors"))
    assert written == metrics["certificate"]["used"] <= 6_600_000
    widths = [tuple(expert) for layer in metrics["expert_widths"]["layers"] for expert in layer["widths"]]
    assert len(widths) == 6 * 32
    assert {2, 3, 4} & {width for expert in widths for width in expert}
    assert all(len(set(expert)) == 1 for expert in widths)
    assert "Bits of every expert" in page
    assert "Every expert was fitted to" not in page or "calibration tokens" in page


@pytest.mark.slow
def test_mxmoe_and_the_papers_accounting(tmp_path, capsys):
    metrics, _ = quantize(
        tmp_path / "run", "--bits", "3.0", "--count", "experts", "--lock", "attention=16", "--per-projection",
        "--searcher", "mxmoe", "--format", "none",
    )  # fmt: skip
    assert metrics["budget"]["average_bits_exact"] == "3"
    layers = metrics["expert_widths"]["layers"]
    # Every layer spends the same, gate and up share a width, and down is free.
    assert {sum(map(sum, layer["widths"])) for layer in layers} == {3 * 3 * 32}
    assert all(gate == up for layer in layers for gate, up, _ in layer["widths"])
    assert any(gate != down for layer in layers for gate, _, down in layer["widths"])
    assert all(group["width"] == 16 for group in metrics["groups"] if "self_attn" in group["name"])


MISTAKES = [
    (["--bits", "3", "--count", "experts"], "would cost nothing"),
    (["--bits", "3", "--per-projection", "--expert-groups", "layer"], "contradicts"),
    (["--bits", "3", "--serve", "vllm", "--per-projection"], "loads experts grouped by layer"),
    (["--active-bits", "3", "--count", "experts"], "would cost nothing"),
    (["--size", "6MB", "--count", "experts"], "leave out --count experts"),
    (["--bits", "3", "--allow-prune", "--format", "gptqmodel"], "keeps every expert"),
    (["--bits", "3", "--format", "llama.cpp"], "search with --serve llamacpp"),
    (
        ["--bits", "3", "--active-bits", "3"],
        "--bits, --bpw, --size, --active-bits; got --active-bits, --bits.",
    ),
    (["--active-bits", "three"], "--active-bits must"),
    (["--bits", "1.5", "--lock", "attention=16", "--count", "experts"], "between 2 and 8"),
]
# MLX takes groups of 32 columns and more, which the random model does not have.
MISTAKES_WITH_MLX = [
    (["--widths", "2,3,4"], "--expert-groups layer-projection"),
    (["--expert-groups", "layer-projection"], "supports 2, 3, 4, 5, 6, 8"),
]


def test_mistakes_end_with_one_line(tmp_path, capsys, random_moe, texts):
    shared = ["--data", texts, "--sequences=4", "--selection=2", "--length=16", "--quiet"]
    shared += ["--out", str(tmp_path / "run")]
    cases = [([str(random_moe), "--group-size=8", *arguments], words) for arguments, words in MISTAKES]
    cases += [(["tiny-moe", "--bits=3", "--format=mlx", *given], words) for given, words in MISTAKES_WITH_MLX]
    for arguments, words in cases:
        assert main(["quantize", *arguments, *shared]) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
