"""``rco quantize --serve llamacpp`` end to end."""

import json
import re
from fractions import Fraction

import pytest

from rco.cli import main
from rco.compression.llama_quantize import RECIPE_TYPES
from rco.export.llama_cpp import parse_tensor_types

QUICK = [
    "--sequences", "4", "--sensitivity", "2", "--selection", "2", "--evaluation", "2", "--length", "64",
    "--steps", "2", "--samples", "2", "--refine", "1", "--widths", "4,8", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamacpp") / "run"
    command = ["quantize", "tiny-llama", "--bpw", "6", "--serve", "llamacpp", "--out", str(folder), *QUICK]
    assert main(command) == 0
    return folder


def test_the_search_counts_block_types_and_the_recipe_names_them(finished):
    metrics = json.loads((finished / "metrics.json").read_text())
    rules = parse_tensor_types((finished / "model" / "tensor_types.txt").read_text())
    types = {pattern.strip("^$").replace("\\", ""): RECIPE_TYPES[kind] for pattern, kind in rules}
    weights = bits = 0
    for group in metrics["groups"]:
        (member,) = group["members"]
        assert group["parameters"] > 0
        block, path = member.removeprefix("model.layers.").split(".", 1)
        stem = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
        stem |= {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
        kind = types[f"blk.{block}.{stem[path.rpartition('.')[2]]}.weight"]
        assert kind.scheme.bits == group["width"]
        weights += group["parameters"]
        bits += kind.bits_per_weight * group["parameters"]
    assert bits == metrics["budget"]["used_units"]
    assert bits <= Fraction(6) * weights
    certificate = metrics["certificate"]
    assert certificate["used"] == bits
    assert metrics["export"]["total_bytes"] == sum(metrics["export"]["tensors"].values())
    assert "llama-quantize" in (finished / "report.html").read_text()


def test_dry_run_lists_the_types(capsys, tmp_path):
    assert main(["quantize", "tiny-llama", "--size", "7MB", "--serve", "llamacpp", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for kind in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "q5_0"):  # rows of 256 and of 704
        assert kind in shown
    searched, others = re.search(
        r"7,000,000 bytes: ([\d,]+) bytes for these, ([\d,]+) for everything else", shown
    ).groups()
    assert int(searched.replace(",", "")) + int(others.replace(",", "")) == 7_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "compressed-tensors"], "--format llama.cpp"),
        (["--symmetric"], "own grid"),
        (["--group-size", "64"], "leave out --group-size"),
        (["--widths", "4,7"], "not 7"),
        (["--format", "lama.cpp"], "Did you mean llama.cpp"),
    ],
)
def test_what_cannot_go_with_llamacpp_is_refused_at_once(arguments, message, capsys):
    code = main(["quantize", "tiny-llama", "--bpw", "5", "--serve", "llamacpp", *arguments, "--dry-run"])
    assert code == 1
    assert message in capsys.readouterr().err


def test_export_writes_the_recipes_of_other_tools(finished, capsys, tmp_path):
    files = {"gptqmodel": "quantize_config.json", "llm-compressor": "recipe.json", "mlx": "convert.py"}
    for name, file in files.items():
        assert main(["export", str(finished), "--format", name, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name / file).is_file()
    assert "python convert.py" in capsys.readouterr().out
    assert main(["export", str(finished), "--out", str(tmp_path / "other")]) == 1
    assert "--format llama.cpp" in capsys.readouterr().err
