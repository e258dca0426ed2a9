from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    from rco.models.zoo import find_builtin

    return AutoTokenizer.from_pretrained(find_builtin("tiny-llama").locate()[0])
