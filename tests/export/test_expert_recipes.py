"""Recipes for mixtures of experts: every linear under the name that each tool gives it once experts are apart.

The tools hold experts as separate linears, whatever the checkpoint calls them. What they build is asked of the
tools themselves where they are installed; their names are written down below for everybody else.
"""

import json
import re
import types

import pytest
from torch import nn
from transformers import AutoConfig

from rco import registry
from rco.export import ExportError
from rco.export.exporter import ExportRequest
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.formats.rounding import round_to_nearest
from rco.models.loading import wrap_model
from rco.models.moe.layers import MOE_ARCHITECTURES
from rco.models.moe.linears import ExpertLinear, model_linears
from rco.testing.tiny_models import tiny_model

TOOLS = ["gptqmodel", "llm-compressor", "auto-round"]
SCHEMES = [
    IntegerGrid(2, 16, symmetric=True),
    IntegerGrid(4, 8, symmetric=True),
    IntegerGrid(3, 16, symmetric=True),
    ORIGINAL,
    IntegerGrid(8, 8, symmetric=True),
]
# Both sides of every matrix are multiples of 32, as AutoRound wants.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32,
    "linear_num_value_heads": 16,
}  # fmt: skip


def tool_name(info):
    """What the tools call a linear: their experts have a gate, an up and a down projection in every model."""
    if not isinstance(info, ExpertLinear):
        return info.name
    return f"{info.layer.experts_name}.{info.expert}.{info.projection}_proj"


class Case:
    """A model of an architecture, a scheme for every linear, and the recipe that a tool gets."""

    def __init__(self, architecture, tool, folder, schemes=SCHEMES):
        self.loaded = wrap_model(sized(architecture))
        found = model_linears(self.loaded.layout, self.loaded.model)
        self.linears = [info for info in found if takes(architecture, tool, info)]
        self.schemes = {info.name: schemes[n % len(schemes)] for n, info in enumerate(self.linears)}
        weights = {
            info.name: round_to_nearest(info.weight, [grid(self.schemes[info.name])])[0]
            for info in self.linears
            if self.schemes[info.name] != ORIGINAL
        }
        registry.load(registry.EXPORTERS, tool, "format")().export(
            ExportRequest(self.loaded, weights, folder)
        )
        (file,) = folder.glob("*.json")
        self.content = json.loads(file.read_text())
        # By the tool's names, as they must come out; what is in no search is left alone.
        self.wanted = {tool_name(info): self.schemes[info.name] for info in self.linears}


def sized(architecture):
    """A model whose configuration has no field that is not its own: tools look at them."""
    known = AutoConfig.for_model(architecture).to_dict()
    return tiny_model(architecture, **{field: size for field, size in SIZES.items() if field in known})


def grid(scheme):
    return IntegerGrid(scheme.bits, scheme.group_size, scheme.symmetric)


def takes(architecture, tool, info):
    """Whether a tool quantizes a linear at all; GPTQModel has no place for some."""
    if tool != "gptqmodel" or not architecture.startswith("qwen"):
        return True
    return not re.search(r"layers\.\d+\.(mlp\.(gate|up|down)_proj|linear_attn\.in_proj_ba)$", info.name)


def arguments(scheme):
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def named(tool, content):
    """Name -> scheme, by the tool's grammar."""
    if tool == "llm-compressor":
        groups = content["quantization_stage"]["quantization_modifiers"]["GPTQModifier"]["config_groups"]
        pairs = [(name, group["weights"]) for group in groups.values() for name in group["targets"]]
        return {n: IntegerGrid(w["num_bits"], w["group_size"], w["symmetric"]) for n, w in pairs}
    entries = content["dynamic"] if tool == "gptqmodel" else content["layer_config"]
    found = {}
    for pattern, entry in entries.items():
        name = pattern.removeprefix("-:").strip("^$").replace("\\", "")
        dense = not entry or entry["bits"] == 16
        found[name] = ORIGINAL if dense else IntegerGrid(entry["bits"], entry["group_size"], entry["sym"])
    return found


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_every_linear_has_its_scheme_under_the_tools_name(architecture, tool, tmp_path):
    case = Case(architecture, tool, tmp_path / "out")
    found = named(tool, case.content)
    wanted = {name: s for name, s in case.wanted.items() if tool != "llm-compressor" or s != ORIGINAL}
    assert {name: found[name] for name in wanted} == wanted
    # Beyond those: only what AutoRound would take for its own, left alone.
    assert all(found[name] == ORIGINAL for name in found.keys() - wanted.keys())


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("qwen3_next", r"in_proj_ba has 4 bits.*`skip="),
        ("qwen3_moe", r"layers\.1\.mlp\.gate_proj has 4 bits.*`skip="),
    ],
)
def test_what_gptqmodel_has_no_place_for_is_refused(architecture, message, tmp_path):
    loaded = wrap_model(sized(architecture))
    linears = model_linears(loaded.layout, loaded.model)
    weights = {info.name: round_to_nearest(info.weight, [IntegerGrid(4, 16)])[0] for info in linears}
    exporter = registry.load(registry.EXPORTERS, "gptqmodel", "format")()
    with pytest.raises(ExportError, match=message):
        exporter.export(ExportRequest(loaded, weights, tmp_path / "out"))
    exporter.export(
        ExportRequest(
            loaded,
            {i.name: weights[i.name] for i in linears if takes(architecture, "gptqmodel", i)},
            tmp_path / "out",
        )
    )


# ----------------------------------------------------------------------------- the tools themselves


def linears_in(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", list(MOE_ARCHITECTURES))
def test_gptqmodel_itself_has_a_place_for_every_linear(architecture, tmp_path):
    """Its list of what it quantizes in a block, under the names of its own rules."""
    config_module = pytest.importorskip("gptqmodel.quantization.config")
    from gptqmodel.models.auto import MODEL_MAP

    case = Case(architecture, "gptqmodel", tmp_path / "out")
    config = config_module.QuantizeConfig(**case.content)
    inside = {
        path.partition(":")[0]
        for paths in MODEL_MAP[architecture].simple_layer_modules(case.loaded.model.config, config)
        for path in paths
    }
    blocks = f"{case.loaded.layout.backbone}.{case.loaded.layout.block_list}."
    for name, scheme in case.wanted.items():
        assert name.removeprefix(blocks).partition(".")[2] in inside
        if scheme == ORIGINAL:
            assert config.dynamic_get(name) is False
        else:
            assert {key: config.dynamic_get(name, key) for key in arguments(scheme)} == arguments(scheme)
    # It quantizes nothing that was not searched: no router, no gate of a shared expert.
    assert not [path for path in inside if re.search(r"mlp\.(gate|router|shared_expert_gate)$", path)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", list(MOE_ARCHITECTURES))
def test_gptqmodel_itself_takes_experts_apart_under_these_names(architecture, tmp_path, monkeypatch):
    defuser = pytest.importorskip("defuser")
    case = Case(architecture, "gptqmodel", tmp_path / "out")
    model = case.loaded.model
    block = type(model.get_submodule(next(i for i in case.linears if isinstance(i, ExpertLinear)).layer.name))
    module = __import__(block.__module__, fromlist=["_"])
    monkeypatch.setattr(module, block.__name__, block)  # what is patched below comes back
    if defuser.replace_fused_blocks(architecture):
        model = type(model)(model.config)
    else:
        assert defuser.convert_model(model)
    assert case.wanted.keys() <= linears_in(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", list(MOE_ARCHITECTURES))
def test_llm_compressor_itself_finds_every_target(architecture, tmp_path):
    recipe_module = pytest.importorskip("llmcompressor.recipe")
    from compressed_tensors.utils import match_named_modules
    from llmcompressor.modeling.moe.linearize import linearize_moe

    case = Case(architecture, "llm-compressor", tmp_path / "out")
    (modifier,) = recipe_module.Recipe.create_instance(str(tmp_path / "out" / "recipe.json")).modifiers
    model = linearize_moe(case.loaded.model)  # as its oneshot() does
    found = {}
    for group in modifier.resolved_config.config_groups.values():
        for name, module in match_named_modules(model, group.targets):
            assert isinstance(module, nn.Linear)
            assert name not in found
            found[name] = IntegerGrid(
                group.weights.num_bits, group.weights.group_size, group.weights.symmetric
            )
    assert found == {name: scheme for name, scheme in case.wanted.items() if scheme != ORIGINAL}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", list(MOE_ARCHITECTURES))
def test_auto_round_itself_resolves_every_expert(architecture, tmp_path):
    resolver = pytest.importorskip("auto_round.compressors.layer_config_resolver")
    from auto_round.modeling.fused_moe.replace_modules import apply_replacements
    from auto_round.schemes import parse_scheme

    case = Case(architecture, "auto-round", tmp_path / "out")
    default, _, _ = parse_scheme(case.content["scheme"], {})
    model = apply_replacements(case.loaded.model)
    blocks = [[name for name, _ in case.loaded.layout.blocks(model)]]
    resolved = resolver.resolve_layer_config(
        model=model,
        scheme=types.SimpleNamespace(value=default, preset_name=None),
        layer_config=case.content["layer_config"],
        quant_block_list=blocks,
    )
    for name, scheme in case.wanted.items():
        if scheme == ORIGINAL:
            assert resolved[name]["bits"] == 16
        else:
            assert {key: resolved[name][key] for key in arguments(scheme)} == arguments(scheme)
    for name in linears_in(model) - case.wanted.keys() - {"lm_head"}:
        assert resolved[name]["bits"] == 16
