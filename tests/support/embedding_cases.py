"""A model whose embedding and output layer are groups, for tests of a sample of the search."""

from pathlib import Path

from rco.compression.budget import Budget
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.formats.base import EncodeSettings
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.testing.search_cases import Case, random_tokens
from rco.testing.tiny_models import tiny_model


def embeddings_case(device, dtype, *, tied, length=96, layers=2):
    """Linears at 2, 4 or 8 bits, six bits on average.

    A tied embedding is one group with the output layer: 8-bit integers with a scale per row, which the general
    kernels of a GPU decode, or unquantized. Another one is a group at the widths of the linears, or unquantized.
    """
    changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": layers}
    model = tiny_model("llama", tie_word_embeddings=tied, **changes).to(device, dtype)
    loaded = wrap_model(model, name="tiny")
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    plan = make_plan(
        loaded.layout, linears, widths=(2, 4, 8), group_size=128, symmetric=True,
        serve="transformers" if tied else "vllm", embeddings=True,
    )  # fmt: skip
    backend = Compression(loaded, plan, Path("unused"))
    settings = EncodeSettings(storage_dtype=dtype, clip="minmax")
    backend.set_packed(
        {
            info.name: {
                plan.label(each): each.encode(info.weight.detach(), settings=settings)
                for each in plan.packed
                if plan.fits(info, each)
            }
            for info in plan.linears
        }
    )
    return Case(loaded, backend, backend.problem(Budget.parse(bits="6")), random_tokens(loaded, 4, length))
