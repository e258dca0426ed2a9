"""What tests of whole commands share: a way to run them, random models to run them on, and text."""

import random

import pytest
import torch
from undrawn_plots import _undrawn_plots  # noqa: F401 - used in every test

from rco.cli import main
from rco.testing.tiny_models import save_tiny

_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "intermediate_size": 16, "tie_word_embeddings": True, "dtype": torch.float32,
}  # fmt: skip


@pytest.fixture
def run(capsys):
    """Runs a command: its exit code, what it printed, what it told on stderr."""

    def command(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory):
    """Folder of a random model that speaks the built-in tokenizer's language."""
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "random-llama", **_SIZES)


@pytest.fixture(scope="session")
def random_moe(tmp_path_factory):
    """The same for a mixture of experts: two layers of eight, of which a token sees two."""
    experts = {"num_experts": 8, "moe_intermediate_size": 8, "mlp_only_layers": [], "norm_topk_prob": True}
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("models") / "random-moe", **_SIZES, **experts)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Two files of random words, as one mixture."""
    folder, words = tmp_path_factory.mktemp("text"), random.Random(0)
    for name in ("one", "two"):
        lines = [" ".join(words.choices("abcdefgh", k=12)) for _ in range(150)]
        (folder / f"{name}.txt").write_text("\n\n".join(lines))
    return f"{folder}/one.txt+{folder}/two.txt"
