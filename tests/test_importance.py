import math

import pytest
import torch

from guide_code.balance import expert_counts
from guide_code.importance import importance_loss, load_loss, smooth_load, squared_variation


def test_squared_variation_by_hand():
    assert squared_variation(torch.tensor([3.0, 3.0, 3.0])).item() == 0
    assert squared_variation(torch.tensor([1.0, 3.0])).item() == pytest.approx(0.25)
    assert squared_variation(torch.tensor([5.0, 5.0] + [0.0] * 6)).item() == pytest.approx(8 / 2 - 1)
    zero_E = torch.zeros(3, requires_grad=True)
    squared_variation(zero_E).backward()
    assert (zero_E.grad == 0).all()


def test_importance_adds_weights_not_counts():
    """Sums (1.4, 0.6): mean 1, variance 0.16. Counts are even."""
    weights_TK = torch.tensor([[0.7, 0.3], [0.7, 0.3]])
    assert importance_loss(weights_TK, torch.tensor([[0, 1], [0, 1]]), 2).item() == pytest.approx(0.16)
    assert importance_loss(weights_TK, torch.tensor([[0, 1], [1, 0]]), 2).item() == pytest.approx(0.0)


def test_padding_and_sentinels_have_no_importance():
    weights_TK = torch.tensor([[0.7, 0.3], [0.6, 0.4], [9.0, 9.0], [torch.nan, 0.0]])
    ids_TK = torch.tensor([[0, 1], [1, 2], [0, 0], [3, -1]])
    loss = importance_loss(weights_TK, ids_TK, 3, torch.tensor([1, 1, 0, 1]))
    assert loss.item() == pytest.approx(importance_loss(weights_TK[:2], ids_TK[:2], 3).item())


def normal_cdf(x):
    return (1 + math.erf(x / math.sqrt(2))) / 2


def test_load_by_hand():
    """One token, noisy logits (2, 1, 0), k = 1: expert 0 must beat 1, the others must beat 2."""
    noisy_TE, logits_TE = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1.5, 1.2, 0.3]])
    expected = [normal_cdf((1.5 - 1.0) / 0.5), normal_cdf((1.2 - 2.0) / 0.5), normal_cdf((0.3 - 2.0) / 0.5)]
    load_E = smooth_load(logits_TE, noisy_TE, 0.5, 1)
    torch.testing.assert_close(load_E, torch.tensor(expected))
    std_TE = torch.tensor([[0.5, 1.0, 2.0]])
    expected = [normal_cdf(0.5 / 0.5), normal_cdf(-0.8), normal_cdf(-1.7 / 2)]
    torch.testing.assert_close(smooth_load(logits_TE, noisy_TE, std_TE, 1), torch.tensor(expected))
    mean = sum(expected) / 3
    wanted = sum((x - mean) ** 2 for x in expected) / 3 / mean**2
    assert load_loss(logits_TE, noisy_TE, std_TE, 1).item() == pytest.approx(wanted, rel=1e-5)


def test_load_is_the_chance_of_being_chosen():
    """Against 4,000 draws: the noise of one expert anew, that of the others as it was."""
    logits_TE = torch.randn(3, 5, dtype=torch.float64)
    noisy_TE = logits_TE + 0.7 * torch.randn(3, 5, dtype=torch.float64)
    chosen_E = torch.zeros(5)
    for expert in range(5):
        again_NTE = noisy_TE.expand(4000, 3, 5).clone()
        again_NTE[..., expert] = logits_TE[:, expert] + 0.7 * torch.randn(4000, 3, dtype=torch.float64)
        chosen_E[expert] = expert_counts(again_NTE.topk(2, dim=-1).indices.flatten(0, 1), 5)[expert] / 4000
    torch.testing.assert_close(smooth_load(logits_TE, noisy_TE, 0.7, 2).float(), chosen_E, atol=0.04, rtol=0)


def test_load_leaves_out_padding_and_bad_rows():
    logits_TE = torch.randn(6, 4)
    noisy_TE = logits_TE + torch.randn(6, 4)
    expected = load_loss(logits_TE[:4], noisy_TE[:4], 1.0, 2)
    logits_TE[4], noisy_TE[5, 1] = 1e6, torch.nan
    logits_TE.requires_grad_()
    loss = load_loss(logits_TE, noisy_TE, 1.0, 2, torch.tensor([1, 1, 1, 1, 0, 1]))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits_TE.grad.isfinite().all() and (logits_TE.grad[4:] == 0).all()
    std_TE = torch.ones(6, 4)
    std_TE[4:] = 0.0  # nothing to divide by where nothing counts
    std_TE.requires_grad_()
    load_loss(logits_TE.detach(), noisy_TE, std_TE, 2, torch.tensor([1, 1, 1, 1, 0, 1])).backward()
    assert std_TE.grad.isfinite().all() and (std_TE.grad[:4] != 0).any() and (std_TE.grad[4:] == 0).all()


def test_both_pass_gradcheck():
    logits_TE = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    noise_TE = torch.randn(7, 5, dtype=torch.float64)
    ids_TK = (logits_TE + noise_TE).topk(2, dim=-1).indices
    mask_T = torch.tensor([1, 1, 1, 0, 1, 1, 1])
    assert torch.autograd.gradcheck(
        lambda x: importance_loss(x.softmax(-1).gather(1, ids_TK), ids_TK, 5, mask_T), logits_TE
    )
    assert torch.autograd.gradcheck(lambda x: load_loss(x, x + noise_TE, x.exp(), 2, mask_T), logits_TE)


def test_bad_arguments_are_named():
    logits_TE = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"top_k must be in \[1, num_experts=4\) to have a load, got 4"):
        smooth_load(logits_TE, logits_TE, 1.0, 4)
    with pytest.raises(ValueError, match=r"noise_std must be above 0, got 0.0"):
        load_loss(logits_TE, logits_TE, 0.0, 2)
