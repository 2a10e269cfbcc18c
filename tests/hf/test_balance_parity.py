"""The losses of the installed transformers: ours give the same values and gradients; its faults are pinned as its."""

import importlib

import pytest
import torch

from guide_code.balance import load_balancing_loss, model_load_balancing_loss, model_z_loss
from guide_code.routers import top_k_routing

pytest.importorskip("transformers")

E, K, LAYERS = 6, 2, 3
B, S = 4, 5


def module(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def layers_of(logits_LTE):
    return [top_k_routing(logits_TE, K) for logits_TE in logits_LTE]


def assert_same_value_and_gradient(ours, theirs, leaf):
    torch.testing.assert_close(ours, theirs)
    (actual,), (expected,) = (torch.autograd.grad(loss, leaf) for loss in (ours, theirs))
    assert expected.abs().max() > 0
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_hf_is_the_loss_of_the_mixtral_family(family, masked):
    logits_LTE = (2 * torch.randn(LAYERS, B * S, E)).requires_grad_()
    mask_BS = torch.ones(B, S, dtype=torch.int64)
    mask_BS[1, 3:], mask_BS[2, :2] = 0, 0
    mask_BS = mask_BS if masked else None
    theirs = module(family).load_balancing_loss_func(tuple(logits_LTE), E, K, mask_BS)
    mask_T = None if mask_BS is None else mask_BS.flatten()
    ours = model_load_balancing_loss(layers_of(logits_LTE), convention="hf", mask_T=mask_T)
    assert_same_value_and_gradient(ours, theirs, logits_LTE)


def test_a_dense_layer_counts_nowhere_in_both():
    """A model whose layers are partly dense hands over the logits of the others."""
    logits_LTE = torch.randn(2, B * S, E)
    theirs = module("mixtral").load_balancing_loss_func(tuple(logits_LTE), E, K)
    first, second = layers_of(logits_LTE)
    torch.testing.assert_close(model_load_balancing_loss([first, None, second], convention="hf"), theirs)


def test_its_fault_layers_that_collapse_apart_look_balanced():
    """known_failures A-02: E = 2, k = 1, one layer on each expert with p = 3/4."""
    apart = tuple(torch.tensor([[0.75, 0.25]] * 8).roll(expert, 1).log() for expert in (0, 1))
    func = module("mixtral").load_balancing_loss_func
    assert func(apart, 2, 1).item() == pytest.approx(1.0)
    assert [func((layer,), 2, 1).item() for layer in apart] == pytest.approx([1.5, 1.5])


def test_its_fault_nothing_but_padding_is_nan():
    mask_BS = torch.zeros(B, S, dtype=torch.int64)
    logits_TE = torch.randn(B * S, E)
    assert module("mixtral").load_balancing_loss_func((logits_TE,), E, K, mask_BS).isnan()
    ours = model_load_balancing_loss(layers_of(logits_TE[None]), convention="hf", mask_T=mask_BS.flatten())
    assert ours.item() == 0


def test_its_fault_a_nan_row_poisons_the_loss():
    logits_TE = torch.randn(B * S, E)
    logits_TE[3, 1] = torch.nan
    assert module("mixtral").load_balancing_loss_func((logits_TE,), E, K).isnan()
    assert model_load_balancing_loss(layers_of(logits_TE[None]), convention="hf").isfinite()


def test_its_fault_a_mask_with_cached_tokens_does_not_fit():
    """known_failures M-02: the mask covers past and new tokens, the logits the new ones."""
    with pytest.raises(RuntimeError):
        module("mixtral").load_balancing_loss_func((torch.randn(B, E),), E, K, torch.ones(B, 5))


def test_hf_switch_is_the_loss_of_switch_transformers():
    """It lines up the layers of each sequence, as ``SwitchTransformersForConditionalGeneration`` does."""
    switch = module("switch_transformers")
    logits_LBSE = (2 * torch.randn(LAYERS, B, S, E)).requires_grad_()
    lined_up = torch.cat(tuple(logits_LBSE), dim=1)
    theirs = switch.load_balancing_loss_func(lined_up.softmax(dim=-1), lined_up.argmax(dim=-1))
    routings = [top_k_routing(logits_BSE.flatten(0, 1), 1) for logits_BSE in logits_LBSE]
    ours = model_load_balancing_loss(routings, convention="hf_switch", group_size=S)
    assert_same_value_and_gradient(ours, theirs, logits_LBSE)
    one = switch.load_balancing_loss_func(logits_LBSE[0].softmax(dim=-1), logits_LBSE[0].argmax(dim=-1))
    alone = load_balancing_loss(routings[0].scores, routings[0].ids, convention="hf_switch", group_size=S)
    torch.testing.assert_close(alone, one)
    theirs = switch.router_z_loss_func(torch.cat(tuple(logits_LBSE), dim=1))
    assert_same_value_and_gradient(model_z_loss(routings, convention="hf_switch"), theirs, logits_LBSE)


@pytest.mark.parametrize(("sparse_layers", "measured"), [(2, False), (1, True)])
def test_its_fault_switch_with_every_layer_sparse_has_no_losses(sparse_layers, measured):
    switch = module("switch_transformers")
    config = switch.SwitchTransformersConfig(
        d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=2, num_decoder_layers=2, vocab_size=16, num_experts=4,
        num_sparse_encoder_layers=sparse_layers, num_sparse_decoder_layers=sparse_layers, expert_capacity=8,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = switch.SwitchTransformersForConditionalGeneration(config).eval()
    tokens_BS = torch.arange(12).view(2, 6)
    out = model(input_ids=tokens_BS, labels=tokens_BS, output_router_logits=True)
    for loss in (out.encoder_z_loss, out.encoder_aux_loss, out.decoder_z_loss, out.decoder_aux_loss):
        assert (loss != 0) == measured
