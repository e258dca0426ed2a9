"""The llama.cpp recipe: names, types, row rules and the size it promises."""

import re
from fractions import Fraction

import pytest
import torch
from named_architectures import NAMED

from rco.compression.file_size import distinct_state
from rco.compression.llama_quantize import GGUF_WIDTHS, RECIPE_TYPES, GGUFFile, block_type, written_type
from rco.export import ExportError
from rco.export.exporter import ExportRequest
from rco.export.llama_cpp import LlamaCppExporter, parse_tensor_types, types_written
from rco.formats.integer import IntegerGrid, PackedWeight
from rco.formats.original import ORIGINAL
from rco.models.gguf_names import gguf_names
from rco.models.layout import layout_for
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.models.zoo import ModelError
from rco.testing.tiny_models import tiny_model

# Rows of 256 (K types), of 288 (plain types only) and of 80 (no type at all).
SIZES = {"hidden_size": 256, "intermediate_size": 288, "num_attention_heads": 8, "head_dim": 32}


@pytest.fixture(scope="module")
def llama():
    return wrap_model(tiny_model("llama", dtype=torch.bfloat16, **SIZES))


def linears_of(loaded):
    return {info.name: info for info in model_linears(loaded.layout, loaded.model, include_head=True)}


def packed(info, scheme):
    """A weight of zeros on the scheme's grid."""
    rows, columns = info.out_features, info.in_features
    size = scheme.group_size or columns
    groups = -(-columns // size)
    codes = torch.zeros(rows, -(-columns * scheme.bits // 32), dtype=torch.int32)
    zeros = None if scheme.symmetric else torch.zeros(rows, groups, dtype=torch.uint8)
    return PackedWeight(codes, torch.ones(rows, groups), zeros, scheme.bits, (rows, columns), size)


def offered(file, info):
    """Every width that a linear may have, with its type."""
    types = {width: file.type_of(info, width) for width in (*GGUF_WIDTHS, 16)}
    return {width: kind for width, kind in types.items() if kind is not None}


def mixed(loaded):
    """Widths that make use of everything on offer."""
    file = GGUFFile.of(loaded.layout, loaded.model)
    choice = {}
    for index, (name, info) in enumerate(linears_of(loaded).items()):
        widths = list(offered(file, info))
        choice[name] = 16 if info.role == "head" else widths[index % len(widths)]
    return file, choice


def weights_for(loaded, file, choice):
    linears = linears_of(loaded)
    return {
        name: packed(linears[name], file.type_of(linears[name], width).scheme)
        for name, width in choice.items()
        if width != 16
    }


# --------------------------------------------------------------------------------- the types


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("q2_k", "2.625"), ("q3_k", "3.4375"), ("q4_k", "4.5"), ("q5_k", "5.5"), ("q6_k", "6.5625"),
        ("q8_0", "8.5"), ("q4_0", "4.5"), ("q5_0", "5.5"), ("q5_1", "6"), ("f16", "16"), ("f32", "32"),
    ],
)  # fmt: skip
def test_true_bits_per_weight(name, bits):
    assert RECIPE_TYPES[name].bits_per_weight == Fraction(bits)


def test_block_sizes_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for name, kind in RECIPE_TYPES.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert (kind.block, kind.block_bytes) == sizes


def test_codes_and_scales_of_a_type_are_those_of_its_grid():
    """Bits of a block: the codes of its grid, and for each group a scale (and a minimum) of 4 to 16 bits."""
    for kind in RECIPE_TYPES.values():
        if kind.scheme == ORIGINAL:
            continue
        groups = kind.block // kind.scheme.group_size
        per_group = 1 if kind.scheme.symmetric else 2
        overhead = 8 * kind.block_bytes - kind.block * kind.scheme.bits
        super_block = 16 * per_group if kind.block == 256 else 0
        each = Fraction(overhead - super_block, groups * per_group)
        assert each in (4, 6, 8, 16)


@pytest.mark.parametrize("columns", [256, 4096, 288, 4128, 32, 80, 100])
def test_options_of_a_row_never_make_llama_cpp_fall_back(columns):
    for width in (*GGUF_WIDTHS, 16):
        kind = block_type(width, columns)
        if kind is None:
            assert width != 16
            assert columns % 256
        else:
            assert written_type(kind.name, columns) == kind.name
            assert kind.scheme == ORIGINAL or kind.scheme.bits == width


@pytest.mark.parametrize(
    ("asked", "columns", "written"),
    [
        ("q4_k", 512, "q4_k"), ("q2_k", 288, "q4_0"), ("q3_k", 288, "q4_0"), ("q4_k", 288, "q5_0"),
        ("q5_k", 288, "q5_1"), ("q6_k", 288, "q8_0"), ("q8_0", 288, "q8_0"), ("q8_0", 80, "f16"),
        ("q4_k", 80, "f16"), ("bf16", 80, "bf16"),
    ],
)  # fmt: skip
def test_fallbacks_of_llama_cpp(asked, columns, written):
    assert written_type(asked, columns) == written


# --------------------------------------------------------------------------------- the names


@pytest.mark.parametrize("model_type", NAMED)
def test_every_linear_of_every_architecture_has_a_name_and_no_two_share_one(model_type):
    model = tiny_model(model_type)
    layout = layout_for(model)
    names = [name for info in layout.linears(model) for name in gguf_names(layout, info.name)]
    assert len(names) == len(set(names))
    file = GGUFFile.of(layout, model)
    assert set(names) <= set(file.tensors)
    # Nothing is lost or counted twice: all weights of the model are in the file.
    text = [
        value.numel()
        for name, value in distinct_state(model).items()
        if name.startswith((f"{layout.backbone}.", "lm_head", "embed_out"))
    ]
    made = sum(t.rows * t.columns for t in file.tensors.values() if t.name.startswith("rope_"))
    assert sum(t.rows * t.columns for t in file.tensors.values()) - made == sum(text)


GGUF_ARCHITECTURES = {
    "llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3",
    "olmo": "OLMO", "olmo2": "OLMO2", "smollm3": "SMOLLM3", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
    "granite": "GRANITE", "cohere": "COMMAND_R", "cohere2": "COHERE2", "phi3": "PHI3", "gpt2": "GPT2",
    "gpt_neox": "GPTNEOX", "olmoe": "OLMOE", "gpt_oss": "GPT_OSS", "qwen3_moe": "QWEN3MOE",
    "qwen2_moe": "QWEN2MOE", "glm4_moe": "GLM4_MOE", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2",
}  # fmt: skip


@pytest.mark.parametrize("model_type", list(GGUF_ARCHITECTURES))
def test_names_are_those_of_the_gguf_package(model_type):
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[GGUF_ARCHITECTURES[model_type]], 8)
    layout = layout_for(tiny_model(model_type))
    prefix = f"{layout.prefix}.1."
    checked = 0
    for path in layout.linear_paths:
        known = table.get_name(f"{prefix}{path}.weight", try_suffixes=(".weight",))
        if known is not None and not path.endswith("kv_b_proj"):  # that one the converter splits
            assert gguf_names(layout, prefix + path) == (known,)
            checked += 1
    assert checked >= 4


def test_experts_share_one_tensor_for_each_projection():
    layout = layout_for(tiny_model("olmoe"))
    for projection in ("gate", "up", "down"):
        for expert in (0, 17):
            name = f"model.layers.3.mlp.experts.{expert}.{projection}_proj"
            assert gguf_names(layout, name) == (f"blk.3.ffn_{projection}_exps.weight",)
    mixtral = [f"model.layers.0.mlp.experts.1.w{i}" for i in (1, 2, 3)]
    layout = layout_for(tiny_model("mixtral"))
    stored = [gguf_names(layout, name)[0] for name in mixtral]
    assert stored == [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "down", "up")]


def test_a_linear_without_a_name_is_refused():
    with pytest.raises(ModelError, match="no known name"):
        gguf_names(layout_for(tiny_model("llama")), "model.layers.0.self_attn.strange_proj")


# ---------------------------------------------------------------------------------- the file


def test_recipe_names_every_weight_with_the_chosen_type(llama, tmp_path):
    file, choice = mixed(llama)
    summary = LlamaCppExporter().export(
        ExportRequest(llama, weights_for(llama, file, choice), tmp_path / "out")
    )
    text = (tmp_path / "out" / "tensor_types.txt").read_text()
    columns = {name: tensor.columns for name, tensor in file.tensors.items() if not tensor.float32}
    written = types_written(text, columns)
    assert written.keys() == columns.keys()
    for name, width in choice.items():
        kind = file.type_of(linears_of(llama)[name], width)
        for stored in gguf_names(llama.layout, name):
            assert written[stored] == kind.name
    assert written["token_embd.weight"] == "bf16"
    assert {"q2_k", "q4_0", "bf16"} <= set(written.values())  # rows of 256, of 288 and left alone
    assert set(summary.tensors) == set(file.tensors)


def test_promised_size_is_the_sum_of_block_sizes(llama, tmp_path):
    file, choice = mixed(llama)
    summary = LlamaCppExporter().export(
        ExportRequest(llama, weights_for(llama, file, choice), tmp_path / "out")
    )
    text = (tmp_path / "out" / "tensor_types.txt").read_text()
    expected = 0
    for name, tensor in file.tensors.items():
        kind = RECIPE_TYPES["f32"]
        for pattern, asked in parse_tensor_types(text):
            if re.search(pattern, name):
                kind = RECIPE_TYPES[asked]
        blocks, rest = divmod(tensor.rows * tensor.columns, kind.block)
        assert rest == 0
        expected += blocks * kind.block_bytes
    assert summary.total_bytes == expected
    assert f"{expected:,} bytes" in (tmp_path / "out" / "README.md").read_text()
    # The costs that a search sees add up to the same number.
    linears = linears_of(llama)
    searched = [linears[name] for name in choice if name != "lm_head"]
    costs = sum(file.linear_bytes(info, choice[info.name]) for info in searched)
    gaps = 31 * len(file.tensors)
    assert costs + file.fixed_bytes(searched) == expected + gaps


def test_promised_size_is_that_of_a_file_by_the_gguf_package(llama, tmp_path):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    file, choice = mixed(llama)
    summary = LlamaCppExporter().export(
        ExportRequest(llama, weights_for(llama, file, choice), tmp_path / "out")
    )
    asked = types_written(
        (tmp_path / "out" / "tensor_types.txt").read_text(),
        {name: tensor.columns for name, tensor in file.tensors.items() if not tensor.float32},
    )
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType[asked.get(name, "f32").upper()]
        row = gguf.quant_shape_to_byte_shape((tensor.columns,), kind)[0]
        writer.add_tensor(name, np.zeros((tensor.rows, row), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    assert {tensor.name: tensor.n_bytes for tensor in reader.tensors} == summary.tensors
    assert path.stat().st_size - reader.data_offset <= summary.total_bytes + 31 * len(file.tensors)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (IntegerGrid(4, 64, symmetric=False), "q4_k with 4 bits"),
        (IntegerGrid(7, 32, symmetric=True), "no type of that width"),
    ],
)
def test_a_search_on_other_grids_is_refused(scheme, message, llama, tmp_path):
    info = linears_of(llama)["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ExportError, match=message) as caught:
        LlamaCppExporter().export(ExportRequest(llama, {info.name: packed(info, scheme)}, tmp_path / "out"))
    assert "`serve='llamacpp'`" in str(caught.value)


@pytest.mark.parametrize("text", ["nonsense", "=q4_k", "blk=", "blk=q9_z"])
def test_files_that_llama_quantize_refuses(text):
    with pytest.raises(ExportError):
        parse_tensor_types(f"^output\\.weight$=f16\n{text}\n")


def test_latent_attention_takes_a_type_that_fits_both_of_its_tensors():
    sizes = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    model = tiny_model("deepseek_v3", **sizes)
    loaded = wrap_model(model)
    file = GGUFFile.of(loaded.layout, model)
    info = linears_of(loaded)["model.layers.0.self_attn.kv_b_proj"]
    assert {width: kind.name for width, kind in offered(file, info).items()} == {
        4: "q4_0", 5: "q5_0", 8: "q8_0", 16: "f16"
    }  # fmt: skip
    both = [file.tensors[name] for name in gguf_names(loaded.layout, info.name)]
    assert sum(RECIPE_TYPES["q5_0"].tensor_bytes(t.rows, t.columns) for t in both) == file.linear_bytes(
        info, 5
    )


def test_experts_of_a_layer_make_one_tensor_and_must_agree(tmp_path):
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 32, "mlp_only_layers": []}
    loaded = wrap_model(tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes))
    file, linears = GGUFFile.of(loaded.layout, loaded.model), linears_of(loaded)
    experts = {name: info for name, info in linears.items() if info.role == "experts"}
    assert experts
    choice = {name: 8 if info.in_features == 32 else 3 for name, info in experts.items()}
    summary = LlamaCppExporter().export(
        ExportRequest(loaded, weights_for(loaded, file, choice), tmp_path / "out")
    )
    written = types_written(
        (tmp_path / "out" / "tensor_types.txt").read_text(), {name: 256 for name in summary.tensors}
    )
    assert written["blk.0.ffn_down_exps.weight"] == "q8_0"
    assert written["blk.0.ffn_gate_exps.weight"] == "q3_k"
    stacks = {name: size for name, size in summary.tensors.items() if "_exps" in name}
    assert sum(stacks.values()) == sum(
        file.linear_bytes(info, choice[name]) for name, info in experts.items()
    )
    choice[min(experts)] = 4
    with pytest.raises(ExportError, match="all experts of a layer"):
        LlamaCppExporter().export(
            ExportRequest(loaded, weights_for(loaded, file, choice), tmp_path / "other")
        )
