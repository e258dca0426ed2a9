"""An embedding that switches between options: rows, gradients of the gates, and a tied output layer."""

import pytest
import torch
from choices_on_device import decoder_by_place

from rco import formats
from rco.formats.switchable import LayerOptions
from rco.formats.switchable_embedding import SwitchableEmbedding
from rco.models.embeddings import embedding_info, switchable_ends
from rco.models.layout import layout_for
from rco.models.switchable_model import switchable_model
from rco.models.zoo import ModelError
from rco.testing.tiny_models import tiny_model


def options_of(weight):
    names = ["int3-g16", "bf16", "int8-channel"]
    return [None, *(formats.parse(name).encode(weight.float()) for name in names)]


def dense_of(options, weight):
    return torch.stack([weight if each is None else each.dequantize(weight.dtype) for each in options])


@pytest.mark.parametrize("scale", [None, 2.5])
def test_rows_and_gate_gradients_are_those_of_dense_tables(scale):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 48, generator=generator)
    options, tokens = options_of(weight), torch.tensor([[3, 3, 39, 0], [7, 3, 1, 0]])
    layer = SwitchableEmbedding(options, weight, scale)
    dense = dense_of(options, weight)
    probe = torch.randn(2, 4, 48, generator=generator)
    for choice in range(len(options)):
        gate = torch.zeros(len(options)).index_fill_(0, torch.tensor(choice), 1.0).requires_grad_()
        mixed = gate.detach().clone().requires_grad_()
        layer.select(choice, gate)
        found = layer(tokens)
        expected = torch.einsum("k,kvh->vh", mixed, dense)[tokens] * (scale or 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        (ours,) = torch.autograd.grad((found * probe).sum(), gate)
        (theirs,) = torch.autograd.grad((expected * probe).sum(), mixed)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        layer.select(choice, gate, [True, False, True, False])
        (some,) = torch.autograd.grad((layer(tokens) * probe).sum(), gate)
        torch.testing.assert_close(some[[0, 2]], theirs[[0, 2]], rtol=1e-4, atol=1e-4)
        assert not some[[1, 3]].any()
        assert torch.equal(layer.selected_weight(torch.float32), dense[choice])


@pytest.mark.parametrize("scale", [None, 2.5])
def test_a_choice_on_the_device_gives_what_one_on_the_host_does(scale, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, probe = (torch.randn(shape, generator=generator) for shape in ((40, 48), (2, 4, 48)))
    options, tokens = options_of(weight), torch.tensor([[3, 3, 39, 0], [7, 3, 1, 0]])
    options.append(options[1])  # stands in for one that does not fit
    layer, count = SwitchableEmbedding(options, weight, scale), len(options)
    assert not layer.supports_device_choice(weight.dtype)
    layer.select(0, place=torch.tensor(1))
    with pytest.raises(ValueError, match=r"No kernel decodes .* by a choice on cpu"):
        layer(tokens)
    monkeypatch.setattr(LayerOptions, "chosen_decoder", decoder_by_place)
    assert layer.supports_device_choice(weight.dtype)
    for choice in range(count):
        found = []
        for place in (None, torch.tensor(choice)):
            gate = torch.eye(count, dtype=torch.float64)[choice].requires_grad_()
            # Where the choice is read from the device, the one of the host is another.
            layer.select(choice if place is None else (choice + 2) % count, gate, place=place)
            rows = layer(tokens)
            found.append([rows.detach(), *torch.autograd.grad(rows, gate, probe)])
            with torch.no_grad():
                assert torch.equal(layer(tokens), rows)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    layer.noise = torch.zeros_like(weight)
    assert not layer.supports_device_choice(weight.dtype)


def test_a_tied_embedding_counts_both_uses():
    model = tiny_model("llama", tie_word_embeddings=True)
    layout = layout_for(model)
    info = embedding_info(layout, model)
    assert (info.name, info.tied, info.out_features) == ("model.embed_tokens", True, 96)
    weight = model.model.embed_tokens.weight.detach()
    options = options_of(weight)
    dense = dense_of(options, weight)
    tokens, probe = torch.tensor([[5, 9, 5, 30]]), torch.randn(4, 96)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def with_table(gates):
        table = torch.einsum("k,kvh->vh", gates, dense)
        replaced = {"model.embed_tokens.weight": table, "lm_head.weight": table}
        logits = torch.func.functional_call(model, replaced, (tokens,)).logits
        return (logits[0] * probe).sum()

    mixed = torch.tensor([0.0, 1.0, 0.0, 0.0], requires_grad=True)
    (theirs,) = torch.autograd.grad(with_table(mixed), mixed)
    ends = switchable_ends(layout, model, info, options)
    assert set(ends) == {"model.embed_tokens", "lm_head"}
    gates = torch.tensor([[0.0, 1.0, 0.0, 0.0]], requires_grad=True)
    with switchable_model(model, ends) as switched:
        switched.set_gates(gates, dict.fromkeys(ends, 0))
        loss = (model(tokens).logits[0] * probe).sum()
        (ours,) = torch.autograd.grad(loss, gates)
    torch.testing.assert_close(ours[0], theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_tables_that_are_not_known_are_refused():
    model = tiny_model("llama", tie_word_embeddings=False)
    layout = layout_for(model)

    class Other(torch.nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens) + 1

    assert not embedding_info(layout, model).tied
    model.model.embed_tokens = Other.from_pretrained(model.model.embed_tokens.weight)
    with pytest.raises(ModelError, match=r"embed_tokens is a Other"):
        switchable_ends(layout, model, embedding_info(layout, model), [None])
    with pytest.raises(ValueError, match=r"Option 0 has shape \(2, 32\), the layer needs \(4, 32\)"):
        SwitchableEmbedding([formats.parse("bf16").encode(torch.zeros(2, 32))], torch.zeros(4, 32))
