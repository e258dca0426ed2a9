"""A mixture of experts whose experts have widths, for tests of a sample of the search."""

from rco.compression.budget import Budget
from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.models.moe.linears import model_linears
from rco.models.shapes import random_model
from rco.testing.search_cases import Case, random_tokens


def experts_case(
    folder, device, dtype, *, prune, length=96, shape="quick-moe", group=32, layers=None, widths=(2, 4, 16)
):
    """Experts at 2, 4 or 16 bits that may be pruned or not, three bits on average."""
    loaded = random_model(shape, device=device, dtype=dtype, layers=layers)
    plan = make_plan(
        loaded.layout,
        model_linears(loaded.layout, loaded.model),
        widths=widths,
        group_size=group,
        symmetric=False,
        allow_prune=prune,
    )
    backend = Compression(loaded, plan, folder, settings=CandidateSettings(method="rtn"))
    data = random_tokens(loaded, 4, length)
    backend.candidates(data)
    return Case(loaded, backend, backend.problem(Budget.parse(bits="3")), data)
