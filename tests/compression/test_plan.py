"""Groups, locks, ties and the rules of serving engines."""

import pytest

from rco.compression.plan import make_plan
from rco.formats import parse
from rco.formats.original import ORIGINAL
from rco.models.layout import layout_for
from rco.models.moe.linears import model_linears
from rco.testing.tiny_models import tiny_model


def laid_out(model):
    layout = layout_for(model)
    return layout, layout.linears(model, include_head=True)


@pytest.fixture(scope="module")
def llama():
    return laid_out(tiny_model("llama"))


def test_every_linear_is_a_group_and_the_head_stays_out(llama):
    layout, linears = llama
    plan = make_plan(layout, linears, group_size=None)
    assert [g.name for g in plan.groups] == [info.name for info in linears if info.role != "head"]
    assert plan.skipped == tuple(info.name for info in linears if info.role == "head")
    assert not plan.symmetric


def test_locks_skips_and_ties(llama):
    layout, linears = llama
    plan = make_plan(
        layout,
        linears,
        group_size=None,
        widths=(2, 3, 4, 16),
        locks=["layers.0.*q_proj=4"],
        skips=["down_proj"],
        ties=["q_proj,k_proj,v_proj"],
    )
    first = plan.groups[0]
    assert first.name.endswith("q_proj+k_proj+v_proj")
    assert first.widths == (4,)
    assert all("down_proj" not in info.name for info in plan.linears)
    assert all("down_proj" in name or name == "lm_head" for name in plan.skipped)


def test_vllm_ties_what_it_merges_and_needs_symmetric_grids(llama):
    layout, linears = llama
    plan = make_plan(layout, linears, group_size=64, serve="vllm")
    assert plan.symmetric
    sizes = sorted(len(group.members) for group in plan.groups)
    assert set(sizes) == {1, 2, 3}  # o and down alone, gate with up, q with k and v
    with pytest.raises(ValueError, match="symmetric"):
        make_plan(layout, linears, group_size=64, serve="vllm", symmetric=False)
    assert not make_plan(layout, linears, group_size=64, serve="vllm", widths=(4, 8)).symmetric
    with pytest.raises(ValueError, match="all of them or none"):
        make_plan(layout, linears, group_size=64, serve="vllm", skips=["q_proj"])


def test_marlin_takes_four_and_eight_bits(llama):
    layout, linears = llama
    plan = make_plan(layout, linears, group_size=128, serve="vllm-marlin", widths=(4, 8, 16))
    assert plan.symmetric
    with pytest.raises(ValueError, match="widths 4, 8"):
        make_plan(layout, linears, group_size=128, serve="vllm-marlin", widths=(3, 4))
    with pytest.raises(ValueError, match="group sizes"):
        make_plan(layout, linears, group_size=48, serve="vllm-marlin", widths=(4, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"serve": "ollama"}, "Unknown engine"),
        ({"locks": ["q_proj"]}, "REGEX=VALUE"),
        ({"locks": ["q_proj=9"]}, "one of 2, 3, 4, 5, 6, 7, 8, 16"),
        ({"locks": ["nothing_here=4"]}, "matches no linear"),
        ({"skips": ["("]}, "regular expression"),
        ({"skips": ["proj"]}, "nothing is left"),
        ({"ties": ["q_proj"]}, "two or more"),
        ({"ties": ["q_proj,nope"]}, "two or more"),
        ({"widths": (16,)}, "at least two"),
        ({"widths": (2, 9)}, "2 to 8 bits"),
        ({"ties": ["q_proj,k_proj"], "locks": ["q_proj=2", "k_proj=3"]}, "share one width"),
    ],
)
def test_what_cannot_work_is_refused(llama, arguments, message):
    layout, linears = llama
    with pytest.raises(ValueError, match=message):
        make_plan(layout, linears, group_size=None, **arguments)


def test_an_untied_output_layer_is_a_group_if_asked():
    layout, linears = laid_out(tiny_model("llama", tie_word_embeddings=False))
    plan = make_plan(layout, linears, widths=(2, 4), embeddings=True)
    assert plan.groups[-1].members[0].role == "head"
    assert plan.groups[-1].widths == (2, 4)
    assert not plan.skipped
    assert make_plan(layout, linears, widths=(2, 4)).skipped == ("lm_head",)
    layout, linears = laid_out(tiny_model("llama", tie_word_embeddings=True))
    assert make_plan(layout, linears, widths=(2, 4), embeddings=True).skipped == ("lm_head",)


def with_ends(name, **settings):
    model = tiny_model(name, **settings)
    layout = layout_for(model)
    return layout, model_linears(layout, model, include_head=True, include_embedding=True)


def embedding_of(plan):
    (found,) = (group for group in plan.groups if group.members[0].role == "embedding")
    return [option.name for option in found.options]


@pytest.mark.parametrize(
    ("serve", "formats"),
    [
        ("any", ["int8", "original"]),
        ("transformers", ["int8", "original"]),
        ("vllm", ["int2-g16-sym", "int4-g16-sym", "int8-g16-sym", "original"]),
        ("vllm-marlin", ["int4-g32-sym", "int8-g32-sym", "original"]),
    ],
)
def test_an_embedding_has_the_formats_that_the_engine_reads(serve, formats):
    size = 32 if serve == "vllm-marlin" else 16
    layout, linears = with_ends("qwen3", tie_word_embeddings=True)
    plan = make_plan(layout, linears, group_size=size, serve=serve, embeddings=True)
    assert embedding_of(plan) == formats
    assert not plan.skipped  # the output layer is in the group of the embedding
    # Candidates are made of what a linear may take: bytes are for embeddings alone.
    linear, embedding = plan.linears[0], plan.linears[-1]
    assert embedding.role == "embedding"
    for option in plan.options:
        assert plan.fits(embedding, option) == (option.name in formats)
        assert plan.fits(linear, option) == (option.name not in ("int8", "original"))
    off = make_plan(layout, linears, group_size=size, serve=serve)
    assert set(off.skipped) == {"lm_head", "model.embed_tokens"}
    assert off.labels == tuple(label for label in plan.labels if label not in ("int8", "original", "16"))


def test_formats_of_an_embedding_that_are_asked_for():
    layout, linears = with_ends("llama", tie_word_embeddings=False)
    formats = [parse("fp8"), parse("nvfp4"), ORIGINAL]
    plan = make_plan(layout, linears, formats=formats, embeddings=True)
    assert embedding_of(plan) == ["fp8", "int8", "original"]
    for lock, left in {"embedding=16": ["original"], "embedding=int8": ["int8"]}.items():
        plan = make_plan(layout, linears, widths=(4, 8), locks=[lock], embeddings=True)
        assert embedding_of(plan) == left
    assert embedding_of(make_plan(layout, linears, locks=["embedding=8"], embeddings=True)) == ["int8"]
    with pytest.raises(ValueError, match=r"reads an embedding as int8, original, not as 4 bits"):
        make_plan(layout, linears, locks=["embedding=4"], embeddings=True)


def test_what_no_reader_takes_is_refused_or_left_alone():
    layout, linears = with_ends("mixtral")  # vLLM's model of it has an unquantized embedding
    plan = make_plan(layout, linears, group_size=16, serve="vllm", embeddings=None)
    assert plan.skipped == ("model.embed_tokens",)
    with pytest.raises(ValueError, match=r"no packed embedding of mixtral.*embedding=16.*transformers"):
        make_plan(layout, linears, group_size=16, serve="vllm", embeddings=True)
    layout, linears = with_ends("opt", tie_word_embeddings=False)
    plan = make_plan(layout, linears, group_size=16, serve="vllm", embeddings=None)
    assert plan.skipped == ("lm_head", "model.decoder.embed_tokens")
    with pytest.raises(ValueError, match=r"no packed output layer of opt"):
        make_plan(layout, linears, group_size=16, serve="vllm", locks=["lm_head=4"])
    layout, linears = with_ends("llama", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lock the embedding instead"):
        make_plan(layout, linears, locks=["lm_head=4"])
    with pytest.raises(ValueError, match=r"no linears of that role; the embedding is a group"):
        make_plan(layout, linears[:-1], locks=["embedding=8"])


def test_a_preset_that_needs_fused_linears_names_what_it_lacks():
    layout, linears = laid_out(tiny_model("helium"))
    with pytest.raises(
        ValueError, match=r"merges some linears.*not known for helium.*rco.models.layout.FUSED"
    ):
        make_plan(layout, linears, serve="vllm")
    assert len(make_plan(layout, linears, serve="transformers").groups) == len(linears) - 1


def test_linears_that_cannot_be_packed_are_locked():
    model = tiny_model("mamba")
    layout, linears = laid_out(model)
    plan = make_plan(layout, linears, widths=(2, 4), unpackable=layout.unpackable(model))
    widths = {group.name.rpartition(".")[2]: group.widths for group in plan.groups}
    assert widths == {"in_proj": (2, 4), "x_proj": (2, 4), "dt_proj": (16,), "out_proj": (16,)}


def named(*names):
    return [parse(name) for name in names]


def test_formats_stand_beside_widths_or_alone(llama):
    layout, linears = llama
    alone = make_plan(layout, linears, formats=named("nvfp4-a4", "fp8-dynamic", "original"))
    assert alone.labels == ("nvfp4-a4", "fp8-dynamic", "16")
    mixed = make_plan(layout, linears, formats=named("nvfp4"), widths=(3, 4), group_size=None)
    assert mixed.labels == ("3", "int4-channel", "nvfp4")
    locked = make_plan(
        layout,
        linears,
        formats=named("nvfp4", "fp8"),
        locks=["q_proj=fp8", "down_proj=16", "up_proj=original"],
    )
    assert {group.options[0].name for group in locked.groups if "q_proj" in group.name} == {"fp8"}
    assert {group.options for group in locked.groups if "down_proj" in group.name} == {(ORIGINAL,)}
    with pytest.raises(ValueError, match="one of 16, nvfp4, fp8, original"):
        make_plan(layout, linears, formats=named("nvfp4", "fp8"), locks=["q_proj=mxfp4"])
    with pytest.raises(ValueError, match="at least two options"):
        make_plan(layout, linears, formats=named("original"))


def test_a_format_is_an_option_only_where_its_groups_divide_the_rows():
    layout, linears = laid_out(tiny_model("llama", intermediate_size=40))  # groups of 16 do not divide 40
    plan = make_plan(layout, linears, formats=named("nvfp4", "fp8", "original"))
    assert {len(group.options) for group in plan.groups if "down_proj" in group.name} == {2}
    assert {len(group.options) for group in plan.groups if "down_proj" not in group.name} == {3}
    with pytest.raises(ValueError, match=r"down_proj can be stored in none of nvfp4.*groups of 16 columns"):
        make_plan(layout, linears, formats=named("nvfp4", "original"))


def test_engines_refuse_formats_that_they_cannot_run(llama):
    layout, linears = llama
    served = make_plan(layout, linears, serve="vllm", formats=named("nvfp4-a4", "fp8-dynamic", "original"))
    assert {len(group.members) for group in served.groups} == {1, 2, 3}
    for engine, name in [
        ("vllm", "mxfp4"),
        ("vllm", "mxfp8"),
        ("vllm", "fp8-block"),
        ("vllm-marlin", "nvfp4-a4"),
    ]:
        with pytest.raises(ValueError, match=f"not {name}"):
            make_plan(layout, linears, serve=engine, formats=named(name, "original"))
    # A block of 128 rows would lie in two of the matrices that are merged.
    blocks = make_plan(layout, linears, serve="vllm", formats=named("fp8-block-dynamic", "nvfp4", "original"))
    assert {len(group.options) for group in blocks.groups if len(group.members) > 1} == {2}


def test_experts_take_formats_that_leave_inputs_alone():
    model = tiny_model("qwen3_moe")
    layout = layout_for(model)
    linears = model_linears(layout, model, include_head=True)
    plan = make_plan(layout, linears, serve="vllm", formats=named("nvfp4", "fp8-dynamic", "original"))
    experts = [group for group in plan.groups if "experts" in group.name]
    assert experts
    assert {group.options for group in experts} == {tuple(named("nvfp4", "original"))}
    assert plan.not_for_experts == ("fp8-dynamic",)
    with pytest.raises(ValueError, match="rounds inputs"):
        make_plan(layout, linears, serve="vllm", formats=named("fp8-dynamic", "original"))
    with pytest.raises(ValueError, match="vllm does not load experts in fp8"):
        make_plan(layout, linears, serve="vllm", formats=named("fp8", "original"))
