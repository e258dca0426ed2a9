"""Recipes: each is read back by the rules of its tool, and by the tool's own parser where that is installed."""

import json
import re
import sys
import types

import pytest
import torch
from named_architectures import NAMED

from rco import registry
from rco.export import ExportError
from rco.export.exporter import ExportRequest
from rco.export.mlx import mlx_paths
from rco.formats.integer import IntegerGrid
from rco.formats.original import ORIGINAL
from rco.models.layout import layout_for
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.testing.tiny_models import tiny_model

RECIPES = ["gptqmodel", "llm-compressor", "auto-round", "mlx"]
SCHEMES = [
    IntegerGrid(2, 32, symmetric=False),
    IntegerGrid(4, 64, symmetric=True),
    IntegerGrid(3, None, symmetric=True),
    IntegerGrid(8, 64, symmetric=True),
    ORIGINAL,
]


@pytest.fixture(scope="module")
def llama():
    return wrap_model(tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32))


@pytest.fixture(scope="module")
def moe():
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
    }
    return wrap_model(tiny_model("qwen2_moe", shared_expert_intermediate_size=128, **sizes))


def linears_of(loaded):
    return {info.name: info for info in model_linears(loaded.layout, loaded.model, include_head=True)}


def chosen(loaded, schemes=SCHEMES):
    """A scheme for every linear, all of them in use, the output layer left alone."""
    names = list(linears_of(loaded))
    found = {name: schemes[i % len(schemes)] for i, name in enumerate(names)}
    return found | {names[-1]: ORIGINAL}


def export(name, loaded, schemes, rtn, out, **keywords):
    linears = linears_of(loaded)
    weights = {
        linear: rtn(linears[linear].weight, scheme.bits, scheme.group_size, scheme.symmetric)
        for linear, scheme in schemes.items()
        if scheme != ORIGINAL
    }
    return registry.load(registry.EXPORTERS, name, "format")().export(
        ExportRequest(loaded, weights, out, **keywords)
    )


def arguments(scheme):
    return {"bits": scheme.bits, "group_size": scheme.group_size or -1, "sym": scheme.symmetric}


# -------------------------------------------------------------------------------- every recipe


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_folder_is_whole_and_is_not_overwritten_unasked(name, llama, rtn, tmp_path):
    schemes = chosen(
        llama, [IntegerGrid(4, 64, symmetric=True), IntegerGrid(2, 32, symmetric=False), ORIGINAL]
    )
    summary = export(name, llama, schemes, rtn, tmp_path / "out")
    assert summary.format == name
    assert summary.files == {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()}
    assert "README.md" in summary.files
    with pytest.raises(ExportError, match="not empty"):
        export(name, llama, schemes, rtn, tmp_path / "out")
    export(name, llama, schemes, rtn, tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("name", [*RECIPES, "llama.cpp"])
def test_recipe_refuses_nothing_to_do_and_unknown_linears(name, llama, rtn, tmp_path):
    exporter = registry.load(registry.EXPORTERS, name, "format")()
    with pytest.raises(ExportError, match="No linear is quantized"):
        exporter.export(ExportRequest(llama, {}, tmp_path / "out"))
    with pytest.raises(ExportError, match="no linear 'nowhere'"):
        exporter.export(
            ExportRequest(llama, {"nowhere": rtn(torch.ones(4, 64), 4, 32, True)}, tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------- GPTQModel


def gptqmodel_override(dynamic, name):
    """The documented rule: exclusions first, then in order; a pattern is matched from the start of the name."""
    ordered = sorted(dynamic.items(), key=lambda item: not item[0].startswith("-"))
    for pattern, override in ordered:
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
            return False if pattern.startswith("-:") else override
    return None


def test_gptqmodel_rules_give_every_linear_its_scheme(llama, rtn, tmp_path):
    schemes = chosen(llama)
    export("gptqmodel", llama, schemes, rtn, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert not config["lm_head"]
    for name, scheme in schemes.items():
        if name != "lm_head":
            expected = False if scheme == ORIGINAL else arguments(scheme)
            assert gptqmodel_override(config["dynamic"], name) == expected


def test_gptqmodel_quantizes_the_output_layer_when_it_was_searched(llama, rtn, tmp_path):
    export("gptqmodel", llama, {"lm_head": IntegerGrid(8, 64, symmetric=True)}, rtn, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text())["lm_head"]


@pytest.mark.filterwarnings("ignore")
def test_gptqmodel_itself_reads_the_rules(llama, rtn, tmp_path):
    config_module = pytest.importorskip("gptqmodel.quantization.config")
    schemes = chosen(llama)
    export("gptqmodel", llama, schemes, rtn, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    config = config_module.QuantizeConfig(**content)
    for name, scheme in schemes.items():
        if name == "lm_head":
            continue
        if scheme == ORIGINAL:
            assert config.dynamic_get(name) is False
        else:
            assert {key: config.dynamic_get(name, key) for key in arguments(scheme)} == arguments(scheme)


# ------------------------------------------------------------------------------ llm-compressor


def test_llm_compressor_groups_hold_every_linear_once(llama, rtn, tmp_path):
    schemes = chosen(llama)
    export("llm-compressor", llama, schemes, rtn, tmp_path / "out")
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    modifier = recipe["quantization_stage"]["quantization_modifiers"]["GPTQModifier"]
    found = {}
    for group in modifier["config_groups"].values():
        weights = group["weights"]
        assert weights["strategy"] == ("channel" if weights["group_size"] is None else "group")
        for target in group["targets"]:
            assert target not in found
            found[target] = IntegerGrid(weights["num_bits"], weights["group_size"], weights["symmetric"])
    assert found == {name: scheme for name, scheme in schemes.items() if scheme != ORIGINAL}


@pytest.mark.filterwarnings("ignore")
def test_llm_compressor_itself_reads_the_recipe(llama, rtn, tmp_path):
    recipe_module = pytest.importorskip("llmcompressor.recipe")
    schemes = chosen(llama)
    export("llm-compressor", llama, schemes, rtn, tmp_path / "out")
    recipe = recipe_module.Recipe.create_instance(str(tmp_path / "out" / "recipe.json"))
    (modifier,) = recipe.modifiers
    assert type(modifier).__name__ == "GPTQModifier"
    found = {
        target: IntegerGrid(group.weights.num_bits, group.weights.group_size, group.weights.symmetric)
        for group in modifier.resolved_config.config_groups.values()
        for target in group.targets
    }
    assert found == {name: scheme for name, scheme in schemes.items() if scheme != ORIGINAL}


# ---------------------------------------------------------------------------------- AutoRound

AUTO_ROUND_KEYS = {"bits", "group_size", "sym", "data_type", "act_bits"}


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_auto_round_names_every_linear_of_a_block(model, rtn, tmp_path, request):
    loaded = request.getfixturevalue(model)
    schemes = chosen(loaded)
    export("auto-round", loaded, schemes, rtn, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "auto_round.json").read_text())["layer_config"]
    for name, module in loaded.model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        scheme = schemes.get(name, ORIGINAL)  # routers are in no search
        assert set(config[name]) <= AUTO_ROUND_KEYS
        expected = {"bits": 16} if scheme == ORIGINAL else arguments(scheme) | {"data_type": "int"}
        assert expected.items() <= config[name].items()


def test_auto_round_recipe_says_which_format_takes_zero_points_at_8_bits(llama, rtn, tmp_path):
    export("auto-round", llama, chosen(llama, [IntegerGrid(8, 64, symmetric=False)]), rtn, tmp_path / "out")
    assert 'format="llm_compressor"' in (tmp_path / "out" / "README.md").read_text()


def test_auto_round_recipe_refuses_what_it_would_leave_alone(rtn, tmp_path):
    odd = wrap_model(tiny_model("llama"))  # 48 rows
    with pytest.raises(ExportError, match="multiples of 32"):
        export("auto-round", odd, chosen(odd, [IntegerGrid(4, 16, symmetric=True)]), rtn, tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
def test_auto_round_itself_resolves_the_layers(llama, rtn, tmp_path):
    resolver = pytest.importorskip("auto_round.compressors.layer_config_resolver")
    schemes_module = pytest.importorskip("auto_round.schemes")
    schemes = chosen(llama)
    export("auto-round", llama, schemes, rtn, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "auto_round.json").read_text())
    default, _, _ = schemes_module.parse_scheme(content["scheme"], {})
    scheme = types.SimpleNamespace(value=default, preset_name=None)
    blocks = [[name for name, _ in llama.layout.blocks(llama.model)]]
    resolved = resolver.resolve_layer_config(
        model=llama.model, scheme=scheme, layer_config=content["layer_config"], quant_block_list=blocks
    )
    for name, wanted in schemes.items():
        if name == "lm_head":
            assert name not in resolved
        elif wanted == ORIGINAL:
            assert resolved[name]["bits"] == 16
        else:
            assert {key: resolved[name][key] for key in arguments(wanted)} == arguments(wanted)


# ----------------------------------------------------------------------------------------- MLX

MLX_SCHEMES = [
    IntegerGrid(2, 32, symmetric=False),
    IntegerGrid(4, 64, symmetric=True),
    IntegerGrid(8, 32, symmetric=True),
    ORIGINAL,
]


def predicate_of(folder, monkeypatch):
    """The predicate of the written script, run with a stand-in for mlx-lm."""
    stand_in = types.ModuleType("mlx_lm")
    stand_in.convert = None
    monkeypatch.setitem(sys.modules, "mlx_lm", stand_in)
    space = {"__file__": str(folder / "convert.py"), "__name__": "convert"}
    exec(compile((folder / "convert.py").read_text(), "convert.py", "exec"), space)
    return space["predicate"]


def test_mlx_predicate_answers_for_every_linear(llama, rtn, tmp_path, monkeypatch):
    schemes = chosen(llama, MLX_SCHEMES)
    export("mlx", llama, schemes, rtn, tmp_path / "out")
    predicate = predicate_of(tmp_path / "out", monkeypatch)
    for name, scheme in schemes.items():
        expected = scheme != ORIGINAL and {
            "group_size": scheme.group_size,
            "bits": scheme.bits,
            "mode": "affine",
        }
        assert predicate(name, None) == expected
    assert predicate("model.embed_tokens", None) is False


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (IntegerGrid(7, 64, symmetric=True), "7 bits"),
        (IntegerGrid(4, 16, symmetric=True), "groups of 16"),
        (IntegerGrid(4, None, symmetric=True), "groups of 256"),
    ],
)
def test_mlx_recipe_refuses_grids_that_mlx_lacks(scheme, message, llama, rtn, tmp_path):
    with pytest.raises(ExportError, match=message):
        export("mlx", llama, chosen(llama, [scheme]), rtn, tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "name", "paths"),
    [
        ("mixtral", "model.layers.1.mlp.experts.3.w3", ["block_sparse_moe.switch_mlp.up_proj"]),
        ("olmoe", "model.layers.1.mlp.experts.3.down_proj", ["mlp.switch_mlp.down_proj"]),
        ("gpt_oss", "model.layers.1.mlp.experts.3.gate_proj", ["mlp.experts.gate_proj"]),
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj", ["self_attn.embed_q", "self_attn.unembed_out"]),
    ],
)
def test_mlx_paths_where_mlx_differs(model_type, name, paths):
    layout = layout_for(tiny_model(model_type))
    assert mlx_paths(layout, name) == tuple(f"model.layers.1.{path}" for path in paths)


# Fields that mlx-lm reads where transformers now has others; deepseek_v2 has none without scaled positions.
_YARN = {
    "type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MLX_FIELDS = {
    "rope_theta": 1e4, "partial_rotary_factor": 1.0, "n_ctx": 128, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "num_experts": 4,
}  # fmt: skip
# mlx-lm's "olmo" is not the architecture that transformers calls so.
_MLX_ARCHITECTURES = sorted(set(NAMED) - {"olmo"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", _MLX_ARCHITECTURES)
def test_mlx_has_a_module_for_every_linear(model_type):
    utils = pytest.importorskip("mlx_lm.utils")
    changes = {"mlp_only_layers": []} if model_type == "qwen2_moe" else {}  # mlx-lm's has no dense layers
    model = tiny_model(model_type, **changes)
    config = json.loads(model.config.to_json_string(use_diff=False))
    scaling = _YARN if model_type == "deepseek_v2" else config.get("rope_scaling")
    described = {**_MLX_FIELDS, **config, "rope_scaling": scaling}
    cls, arguments = utils._get_classes(described)
    modules = cls(arguments.from_dict(described)).named_modules()
    quantizable = {path for path, module in modules if hasattr(module, "to_quantized")}
    layout = layout_for(model)
    asked = {path for info in model_linears(layout, model) for path in mlx_paths(layout, info.name)}
    assert asked <= quantizable


@pytest.mark.filterwarnings("ignore")
def test_mlx_itself_quantizes_by_the_table(llama, rtn, tmp_path):
    nn = pytest.importorskip("mlx.nn")
    utils = pytest.importorskip("mlx_lm.utils")
    from mlx_lm.models import llama as mlx_llama

    schemes = chosen(llama, MLX_SCHEMES)
    export("mlx", llama, schemes, rtn, tmp_path / "out")
    table = json.loads((tmp_path / "out" / "quantization.json").read_text())
    config = json.loads(llama.model.config.to_json_string(use_diff=False))
    model = mlx_llama.Model(mlx_llama.ModelArgs.from_dict(config | {"rope_theta": 1e4}))
    model, described = utils.quantize_model(
        model, config, table["group_size"], table["bits"],
        quant_predicate=lambda path, module: table["modules"].get(path, False),
    )  # fmt: skip
    modules = dict(model.named_modules())
    for name, scheme in schemes.items():
        if scheme == ORIGINAL:
            assert isinstance(modules[name], nn.Linear)
        else:
            assert (modules[name].bits, modules[name].group_size) == (scheme.bits, scheme.group_size)
            assert described["quantization"][name]["bits"] == scheme.bits
