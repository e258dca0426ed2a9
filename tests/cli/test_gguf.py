"""GGUF files from the command line: one of a size, and llama.cpp's mixtures beside it."""

import json

import pytest
from gguf_models import tiny_gguf

from rco.compression.llama_mixes import MIXES

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
    mixes = ["llama-iq3_xxs", "llama-q4_k_m", "pure-q6_k"]
    assert {"llama-iq3_xxs", "llama-q4_k_m"} <= MIXES.keys()
    out = tmp_path / "compared"
    arguments = ["compare", "quantize", model, "--format=gguf", "--data", texts, "--out", out, *SMALL]
    arguments += [f"--size={','.join(mixes[:2])}", f"--methods=rco,output-error,{','.join(mixes)}"]
    code, printed, told = run(
        *arguments, f"--allowance=tokens={LENGTH * 60}", "--seeds=1", "--workers=1", "--no-curves", "--json"
    )
    assert code == 0, told
    outcome = json.loads(printed)
    assert outcome["failed"] == {}
    sizes = {(row["budget"], row["method"]): row["bytes"] for row in outcome["rows"]}
    small, large = sizes["llama-iq3_xxs", "llama-iq3_xxs"], sizes["llama-q4_k_m", "llama-q4_k_m"]
    # A mixture is listed where it fits; the search has as many bytes as the mixture that names the size.
    assert {method for budget, method in sizes if budget == "llama-iq3_xxs"} == {
        "rco", "output-error", "llama-iq3_xxs",
    }  # fmt: skip
    assert ("llama-q4_k_m", "llama-iq3_xxs") in sizes
    assert ("llama-q4_k_m", "pure-q6_k") not in sizes
    for (budget, _), size in sizes.items():
        assert size <= (small if budget == "llama-iq3_xxs" else large)
