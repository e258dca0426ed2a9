"""GGUF files from the command line: one of a size, and llama.cpp's mixtures beside it."""

import json

import pytest
from gguf_models import tiny_gguf

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
