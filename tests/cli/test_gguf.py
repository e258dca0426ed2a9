"""GGUF files from the command line: one of a size, and llama.cpp's mixtures beside it."""

import json

import pytest
import torch
from gguf_models import tiny_gguf

from rco.models.gguf_file import GGUFReader, encoded_value, write_gguf
from rco.models.imatrix_file import ImportanceMatrix

pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
pytest.importorskip("libggml", reason="ggml's encoders are in the extra gguf")
LENGTH = 16
SMALL = [
    "--sequences=4", "--selection=2", "--evaluation=2", f"--length={LENGTH}", "--samples=2", "--sensitivity=2",
    "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", num_hidden_layers=1)


def test_mixtures_are_sizes_and_entrants_of_a_comparison(run, tmp_path, model, texts):
    mixes = ["llama-q3_k_m", "llama-q4_k_m", "pure-q6_k"]
    out = tmp_path / "compared"
    arguments = ["compare", "quantize", model, "--format=gguf", "--data", texts, "--out", out, *SMALL]
    arguments += ["--types=q3_k,q4_0,q4_k,q5_0,q5_1,q5_k,q6_k,q8_0"]
    arguments += [f"--size={','.join(mixes[:2])}", f"--methods=rco,output-error,{','.join(mixes)}"]
    code, printed, told = run(
        *arguments, f"--allowance=tokens={LENGTH * 60}", "--seeds=1", "--workers=1", "--no-curves", "--json"
    )
    assert code == 0, told
    outcome = json.loads(printed)
    assert outcome["failed"] == {}
    sizes = {(row["budget"], row["method"]): row["bytes"] for row in outcome["rows"]}
    small, large = sizes["llama-q3_k_m", "llama-q3_k_m"], sizes["llama-q4_k_m", "llama-q4_k_m"]
    # A mixture is listed where it fits; the search has as many bytes as the mixture that names the size.
    assert {method for budget, method in sizes if budget == "llama-q3_k_m"} == {
        "rco", "output-error", "llama-q3_k_m",
    }  # fmt: skip
    assert ("llama-q4_k_m", "llama-q3_k_m") in sizes
    assert ("llama-q4_k_m", "pure-q6_k") not in sizes
    for (budget, _), size in sizes.items():
        assert size <= (small if budget == "llama-q3_k_m" else large)


def test_a_frontier_shares_candidates_and_gives_later_sizes_a_fifth_of_the_search(
    run, tmp_path, model, texts
):
    out = tmp_path / "sizes"
    base = ["frontier", model, "--format=gguf", "--data", texts, "--out", out, *SMALL]
    base += ["--types=q3_k,q4_0,q4_k,q5_0,q6_k,q8_0", "--steps=20", "--refine=4"]
    code, printed, told = run(*base, "--sizes=300KB..500KB", "--points=3", "--json")
    assert code == 0, told
    points = json.loads(printed)["points"]
    assert [point["size"] for point in points] == [300_000, 400_000, 500_000]
    for point in points:
        written = out / point["checkpoint"]
        assert written.stat().st_size == point["bytes"] == point["certificate"]["checkpoint_bytes"]
        assert point["bytes"] <= point["size"]
    first, *later = points
    assert all(0 < point["evaluations"] <= first["evaluations"] / 5 for point in later)
    assert len((out / "frontier.csv").read_text().splitlines()) == 4
    assert {path.name for path in out.iterdir() if path.suffix in (".md", ".svg", ".gguf")} == {
        "frontier.md", "frontier.svg", *(point["checkpoint"] for point in points),
    }  # fmt: skip
    # Another size is added to a finished frontier; the others stay as they are.
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.gguf")}
    code, printed, told = run(*base, "--sizes=300KB,350KB", "--resume", "--json")
    assert code == 0, told
    assert [point["size"] for point in json.loads(printed)["points"]] == [300_000, 350_000, 400_000, 500_000]
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes=500KB..300KB"], "begins with the smaller one"),
        ([], "Give the sizes of a frontier as --sizes"),
        (["--sizes=300KB", "--bpw=3"], "no other budget"),
        (["--sizes=300KB,1KB"], "1,000 bytes"),
        (["--sizes=300KB", "--tune=full"], "searched, not tuned"),
    ],
)
def test_impossible_frontiers_are_refused_before_anything_is_written(
    run, tmp_path, model, texts, arguments, words
):
    out = tmp_path / "sizes"
    code, _, told = run("frontier", model, "--format=gguf", "--data", texts, "--out", out, *SMALL, *arguments)
    assert code == 1
    assert words in told
    assert not out.exists()


@pytest.mark.slow
def test_a_file_of_a_size_for_a_mixture_of_experts(run, tmp_path, texts):
    source = tiny_gguf(tmp_path / "source.gguf", "qwen3_moe", num_hidden_layers=1)
    out = tmp_path / "model.gguf"
    arguments = ["quantize", source, "--size=700KB", "--types=q3_k,q4_k,q6_k", "--data", texts, "--out", out]
    code, printed, told = run(*arguments, *SMALL, "--steps=2", "--refine=2", "--tune=off", "--json")
    assert code == 0, told
    certificate = json.loads(printed)["certificate"]
    assert out.stat().st_size == certificate["promised_bytes"] == certificate["checkpoint_bytes"] <= 700_000
    kinds = {name: entry.type_name for name, entry in GGUFReader(out).tensors.items()}
    assert {kinds[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} <= {
        "q3_k",
        "q4_k",
        "q6_k",
    }
    assert kinds["blk.0.ffn_gate_inp.weight"] == "f32"


def rewritten(source, target, **metadata):
    """A copy of a GGUF file with other metadata."""
    reader = GGUFReader(source)
    changes = {key.replace("__", "."): encoded_value(value) for key, value in metadata.items()}
    tensors = [(entry, lambda name=name: reader.data(name)) for name, entry in reader.tensors.items()]
    write_gguf(target, reader.metadata.with_values(changes), tensors)
    return target


def test_bad_files_and_sizes_are_refused_and_nothing_is_written(run, tmp_path, model, texts):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-1000])
    headless = tmp_path / "headless.gguf"
    headless.write_bytes(model.read_bytes()[:300])
    unknown = rewritten(model, tmp_path / "unknown.gguf", general__architecture="frobnicate")
    other = tmp_path / "other-imatrix.gguf"
    means = {"blk.0.attn_q.weight": torch.ones(1, 64)}
    ImportanceMatrix(means, {"blk.0.attn_q.weight": torch.tensor([5.0])}, 1, 8, "text").write(other)
    out = tmp_path / "model.gguf"
    before = sorted(tmp_path.iterdir())
    for source, arguments, words in (
        (cut, ["--size=400KB"], "is cut off"),
        (headless, ["--size=400KB"], "is cut off"),
        (unknown, ["--size=400KB"], "frobnicate"),
        (model, ["--size=400KB", "--imatrix", other], "another model"),
        (model, ["--size=100KB"], "must lie between"),
    ):
        code, _, told = run("quantize", source, *arguments, "--data", texts, "--out", out, *SMALL)
        assert code == 1, told
        assert words in told
        assert sorted(tmp_path.iterdir()) == before
