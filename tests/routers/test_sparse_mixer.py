import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from guide_code.routers import SparseMixerRouter, sparse_mixer_ids, sparse_mixer_weights


@pytest.mark.parametrize("margin", [0.0, 0.2, 2.0])
def test_evaluation_equals_transformers(margin):
    logits_TE = torch.randn(200, 7, dtype=torch.float64, requires_grad=True)
    weights_TK, ids_TK = sparsemixer(logits_TE, margin / 2, training=False)
    ours_TK = sparse_mixer_ids(logits_TE, 2, margin=margin)
    assert torch.equal(ours_TK, ids_TK)
    torch.testing.assert_close(sparse_mixer_weights(logits_TE, ours_TK, margin=margin), weights_TK)


def test_training_has_the_distribution_and_the_gradient_of_transformers():
    """For given choices: the gradient is the same on every draw, values are full or a third of the share."""
    row_E = torch.tensor([1.0, 0.9, 0.2, -0.5, 0.95])
    drawn = {}
    for sampler in ("theirs", "ours"):
        logits_TE = row_E.repeat(20000, 1).requires_grad_()
        if sampler == "theirs":
            weights_TK, ids_TK = sparsemixer(logits_TE, 0.3, training=True)
        else:
            ids_TK = sparse_mixer_ids(logits_TE, 2, margin=0.6, sample=True)
            weights_TK = sparse_mixer_weights(logits_TE, ids_TK, margin=0.6, sample=True)
        (weights_TK * torch.tensor([1.0, 3.0])).sum().backward()
        pair_T = ids_TK[:, 0] * 5 + ids_TK[:, 1]
        for pair in pair_T.unique().tolist():
            of_pair = pair_T == pair
            if of_pair.sum() > 200:
                values = (of_pair.float().mean(), weights_TK[of_pair].mean(dim=0), logits_TE.grad[of_pair].mean(dim=0))
                drawn.setdefault(pair, {})[sampler] = values
    assert len(drawn) > 4
    for theirs, ours in (both.values() for both in drawn.values()):
        torch.testing.assert_close(ours[0], theirs[0], atol=0.015, rtol=0)
        torch.testing.assert_close(ours[1], theirs[1], atol=0.03, rtol=0.05)
        # Theirs multiplies the share by a factor first, and its backward pass takes the share before that.
        torch.testing.assert_close(ours[2], theirs[2], atol=2e-3, rtol=2e-2)


def test_router_masks_and_rejects_as_every_router_does():
    router = SparseMixerRouter(16, 6, 2, jitter=0.1, norm_topk_prob=False).train()
    x_TD, mask_T = torch.randn(9, 16), torch.ones(9)
    mask_T[2], x_TD[4] = 0, torch.nan
    routing = router(x_TD, mask_T)
    assert (routing.ids[[2, 4]] == 6).all() and (routing.weights[[2, 4]] == 0).all()
    routing.weights.backward(torch.randn(9, 2))
    assert router.weight.grad.isfinite().all() and router.weight.grad.any()
    summed = SparseMixerRouter(16, 6, 2, routed_scaling_factor=2.0).eval()(torch.randn(5, 16)).weights.sum(dim=-1)
    torch.testing.assert_close(summed, torch.full((5,), 2.0))
    assert router.eval()(x_TD).ids.tolist() == router(x_TD).ids.tolist()


@pytest.mark.parametrize(("options", "words"), [({"score_fn": "sigmoid"}, "score_fn"), ({"num_groups": 2}, "groups")])
def test_options_without_meaning_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SparseMixerRouter(16, 6, 2, **options)
