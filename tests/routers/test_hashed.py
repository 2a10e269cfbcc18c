import pytest
import torch

from guide_code.balance import expert_counts, max_violation
from guide_code.routers import HashRouter, hash_table, top_k_routing


def test_table_has_distinct_experts_and_is_the_same_everywhere():
    table_VK = hash_table(500, 8, 3)
    assert table_VK.shape == (500, 3) and all(len(set(row)) == 3 for row in table_VK.tolist())
    assert torch.equal(table_VK, hash_table(500, 8, 3)) and not torch.equal(table_VK, hash_table(500, 8, 3, seed=1))
    assert table_VK[:2].tolist() == [[2, 3, 4], [4, 5, 6]]
    assert expert_counts(table_VK, 8).min() > 100  # of 187.5 each


def test_counts_balance_the_load():
    counts_V = (10_000 / torch.arange(1, 201)).long()  # Zipf
    words = torch.repeat_interleave(torch.arange(200), counts_V)
    random = max_violation(expert_counts(hash_table(200, 8, 2)[words], 8))
    table_VK = hash_table(200, 8, 2, counts_V=counts_V)
    assert all(len(set(row)) == 2 for row in table_VK.tolist())
    assert max_violation(expert_counts(table_VK[words], 8)) < 0.02 < random
    unseen = hash_table(80, 8, 2, counts_V=torch.zeros(80))
    assert expert_counts(unseen, 8).tolist() == [20] * 8


def test_router_takes_the_experts_of_the_word_and_weighs_them_by_what_it_learned():
    table_VK = hash_table(50, 8, 3)
    options = {"score_fn": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    router = HashRouter(16, 8, table_VK, bias=True, **options)
    x_TD, tokens_T = torch.randn(20, 16), torch.randint(0, 50, (20,))
    routing = router(x_TD, None, tokens_T)
    assert torch.equal(routing.ids, table_VK[tokens_T])
    expected_TK = torch.nn.functional.softplus(routing.logits).sqrt().gather(1, routing.ids)
    torch.testing.assert_close(routing.weights, 1.5 * expected_TK / expected_TK.sum(dim=1, keepdim=True))
    assert torch.equal(top_k_routing(routing.logits, 3, ids_TK=routing.ids, **options).weights, routing.weights)
    routing.weights.backward(torch.randn(20, 3))
    assert router.weight.grad.count_nonzero() > 0


def test_one_expert_per_word_weighs_exactly_1():
    router = HashRouter(16, 8, hash_table(50, 8, 1))
    assert (router(torch.randn(9, 16), None, torch.arange(9)).weights == 1).all()


def test_table_is_in_the_state_dict_and_keeps_its_dtype():
    router = HashRouter(16, 8, hash_table(50, 8, 3))
    other = HashRouter(16, 8, hash_table(50, 8, 3, seed=9))
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.bfloat16().table, hash_table(50, 8, 3)) and other.table.dtype == torch.int64
    with torch.device("meta"):
        meta = HashRouter(16, 8, hash_table(50, 8, 3, counts_V=torch.ones(50, device="cpu")))
    assert meta.table.is_meta


def test_padding_may_hold_any_id_and_real_tokens_may_not():
    router = HashRouter(16, 8, hash_table(50, 8, 3))
    x_TD = torch.randn(2, 16)
    routing = router(x_TD, torch.tensor([1, 0]), torch.tensor([3, -100]))
    assert routing.ids[1].tolist() == [8] * 3
    for outside in (-1, 50):
        with pytest.raises(IndexError):
            router(x_TD, None, torch.tensor([3, outside]))


def test_bad_arguments_are_named():
    router = HashRouter(16, 8, hash_table(50, 8, 3))
    with pytest.raises(ValueError, match="needs the id of each of the 2 tokens, got none"):
        router(torch.randn(2, 16))
    with pytest.raises(ValueError, match=r"of the 2 tokens, got \(3,\)"):
        router(torch.randn(2, 16), None, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"top_k must be in \[1, num_experts=4\], got 5"):
        hash_table(10, 4, 5)
    with pytest.raises(ValueError, match=r"counts must have shape \(10,\)"):
        hash_table(10, 4, 2, counts_V=torch.ones(9))
    with pytest.raises(ValueError, match="the table holds expert 0 to 7, but num_experts=4"):
        HashRouter(16, 4, hash_table(50, 8, 3))
    with pytest.raises(ValueError, match=r"the table must be int64 \(V, K\), got torch.float32 \(3, 2\)"):
        HashRouter(16, 4, torch.ones(3, 2))
