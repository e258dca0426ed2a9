"""Round trips of tiny models: candidates, a gradient, a mixed allocation, a checkpoint, and stock transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.core.problem import Allocation
from rco.export.compressed_tensors import CompressedTensorsExporter
from rco.export.dense import DenseExporter
from rco.export.exporter import ExportRequest
from rco.models.loading import LoadedModel, wrap_model
from rco.models.moe.linears import model_linears, unread_experts
from rco.testing.search_cases import random_tokens
from rco.testing.tiny_models import tiny_model

IDS = torch.arange(3, 17)[None] * 5 % 90
_LOADER = """
import json, sys, torch, transformers
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
ids = torch.tensor(json.loads(sys.argv[1]))
for folder in sys.argv[4:]:
    try:
        # Language parts that only their own class loads are loaded with the class that the checkpoint names.
        config = json.load(open(f"{folder}/config.json"))
        known = config["model_type"] in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        loader = getattr(transformers, sys.argv[2] if known else config["architectures"][0])
        model, report = loader.from_pretrained(
            folder, dtype="auto", output_loading_info=True, trust_remote_code=sys.argv[3] == "True"
        )
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, use_cache=False).logits
        lost = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
        found = {"logits": logits, "lost": lost, "class": type(model).__name__, "error": None}
        torch.save(found, f"{folder}/found.pt")
    except Exception as error:
        torch.save({"logits": None, "lost": [], "error": f"{type(error).__name__}: {error}"}, f"{folder}/found.pt")
"""


def write(model_type: str, folder: Path, *, dense: bool = False, serve: str = "transformers") -> dict:
    """Quantize a tiny model of an architecture; see :func:`quantize`."""
    return quantize(wrap_model(tiny_model(model_type), name=model_type), folder, dense=dense, serve=serve)


def quantize(loaded: LoadedModel, folder: Path, *, dense: bool = False, serve: str = "transformers") -> dict:
    """Quantize a model, write its checkpoint to ``folder / "model"``, and return what was done with it."""
    linears = model_linears(loaded.layout, loaded.model, include_head=True, include_embedding=True)
    unread = unread_experts(loaded.model)
    # Conv1D modules are not packed by compressed-tensors; experts that checkpoints keep stacked are not either.
    transposed = any(info.transposed for info in linears)
    stacked = any(
        getattr(info, "layer", None) is not None and not info.layer.architecture.separable for info in linears
    )
    plan = make_plan(
        loaded.layout,
        linears,
        widths=(4, 8),
        group_size=None,
        serve=serve,
        symmetric=None if serve == "transformers" else True,
        locks=["experts=16"] if stacked and serve == "transformers" else [],
        embeddings=None,
        unread=unread,
        unpackable=() if dense else loaded.layout.unpackable(loaded.model),
    )
    settings = CandidateSettings(sweeps=0, expert_tokens=0, batch_size=2)
    compression = Compression(loaded, plan, folder / "store", settings=settings)
    data = random_tokens(loaded, 2, 12)
    compression.candidates(data)
    chosen = [
        plan.options.index(group.options[index % len(group.options) if group.block is not None else 0])
        for index, group in enumerate(plan.groups)
    ]
    allocation = Allocation(chosen)
    gates = allocation.one_hot(len(plan.options)).requires_grad_()
    with compression.objective(data) as objective:
        loss = objective.loss(gates, 0)
        (gradient,) = torch.autograd.grad(loss, gates)
    with compression.apply(allocation) as applied:
        logits = applied.model(input_ids=IDS, use_cache=False).logits
    deployed, weights = compression.deployed(allocation)
    if dense or transposed:
        DenseExporter().export(ExportRequest(deployed, weights, folder / "model"))
    else:
        CompressedTensorsExporter().export(ExportRequest(deployed, weights, folder / "model", engine=serve))
    packed = [group for group in plan.groups if group.switched]
    return {
        "logits": logits,
        "loss": float(loss),
        "gradient": gradient,
        "packed": len(packed),
        "experts": len(plan.sparse_layers),
        "packed_experts": any(group.switched and hasattr(group.members[0], "layer") for group in plan.groups),
        "unread": [each.name for each in unread],
        "plan": plan,
        "embedding": any(info.role == "embedding" for info in plan.linears if info.name in weights),
    }


def load_elsewhere(
    folders: list[Path], loader: str = "AutoModelForCausalLM", *, own_code: bool = False
) -> list[dict]:
    """What stock transformers computes from checkpoints, in a process that knows nothing of this package.

    With ``own_code``, transformers may run the code in a checkpoint.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", _LOADER, json.dumps(IDS.tolist()), loader, str(own_code), *map(str, folders)],
        check=True,
        capture_output=True,
        env=environment,
    )
    return [torch.load(folder / "found.pt") for folder in folders]
