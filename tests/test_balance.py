import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guide_code.balance import (
    CONVENTIONS,
    Z_CONVENTIONS,
    equivalent_coefficient,
    expert_counts,
    load_balancing_loss,
    max_violation,
    model_load_balancing_loss,
    model_z_loss,
    required_arguments,
    sequence_load_balancing_loss,
    update_expert_bias_,
    z_loss,
)
from guide_code.routers import Routing, top_k_routing
from guide_code.testing.oracle import oracle_load_balancing_loss

ALL_CHOICES = ["switch", "hf", "megatron", "megablocks", "swiss_nanotron", "deepspeed_topk"]
"""Those whose gradients are multiples of each other."""


def loss_of(logits_TE, top_k=2, **options):
    routing = top_k_routing(logits_TE, top_k, mask_T=options.get("mask_T"))
    return load_balancing_loss(routing.scores, routing.ids, **options)


def needed(convention, *, num_layers=1, group_size=2, counts_E=None):
    """The arguments that a convention requires, by name."""
    given = {"num_layers": num_layers, "group_size": group_size, "counts_E": counts_E}
    return {name: given[name] for name in required_arguments(convention)}


def make_routing(logits_TE, top_k=2):
    return top_k_routing(logits_TE, top_k)


# Four tokens in two sequences, three experts, two choices.
# Counts: all choices (2, 4, 2), first choices (2, 1, 1). Mean scores: (.375, .325, .3).
SCORES_TE = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]], dtype=torch.float64)
IDS_TK = torch.tensor([[0, 1], [0, 1], [1, 2], [2, 1]])


@pytest.mark.parametrize(
    ("convention", "options", "value"),
    [
        ("megatron", {}, 3 * (2 * 0.375 + 4 * 0.325 + 2 * 0.3) / 8),
        ("deepspeed_topk", {}, 0.99375),
        ("hf", {}, 2 * 0.99375),
        ("switch", {"num_layers": 1}, 2 * 0.99375),
        ("switch", {"num_layers": 2, "group_size": 2}, (3 * (0.6 + 0.3) + 3 * (0.35 + 0.5)) / 2 / 2),
        ("megablocks", {"num_layers": 4}, 0.99375 / 4),
        ("swiss_nanotron", {"num_layers": 3}, 0.99375 / 3),
        ("megatron_global", {"counts_E": torch.tensor([1, 1, 2])}, 3 * (0.25 * 0.375 + 0.25 * 0.325 + 0.5 * 0.3)),
        ("sequence", {"group_size": 2}, 3 * (0.6 / 2 + 0.3 / 2 + 0.35 / 2 + 0.5 / 2) / 2),
        ("deepspeed_top1", {}, 3 * (2 * 0.375 + 0.325 + 0.3) / 4),
        ("deepspeed_top2", {}, 1.03125),
        ("tutel", {}, 1.03125),
        ("fastmoe", {}, 1.03125),
        ("gshard", {}, 1.03125),
        ("gshard", {"group_size": 2}, (3 * 0.6 + 3 * (0.35 / 2 + 0.5 / 2)) / 2),
        ("st_moe", {"group_size": 2}, 1.5375),
        ("hf_switch", {"group_size": 2}, 1.5375),
        ("fastmoe_switch", {}, 1.03125),
    ],
)
def test_every_convention_by_hand(convention, options, value):
    assert load_balancing_loss(SCORES_TE, IDS_TK, convention=convention, **options).item() == pytest.approx(value)


def test_every_convention_has_a_value_by_hand():
    mark = next(m for m in test_every_convention_by_hand.pytestmark if m.name == "parametrize")
    assert {row[0] for row in mark.args[1]} == set(CONVENTIONS)


def test_fastmoe_switch_divides_everything_by_the_survivors():
    kept_TK = torch.where(torch.tensor([[True], [False], [True], [True]]), IDS_TK, 3)
    loss = load_balancing_loss(SCORES_TE, kept_TK, convention="fastmoe_switch")
    assert loss.item() == pytest.approx(3 * (1 / 3) * (1.5 + 1.3 + 1.2) / 3)


def published(name, scores_TE, ids_TK, size):
    """The losses as their authors wrote them, retyped from the sources that ``CONVENTIONS`` names."""
    (num_tokens, num_experts), top_k = scores_TE.shape, ids_TK.shape[1]
    chosen_TE = torch.nn.functional.one_hot(ids_TK, num_experts).amax(dim=1).to(scores_TE.dtype)
    first_TE = torch.nn.functional.one_hot(ids_TK[:, 0], num_experts).to(scores_TE.dtype)
    if name == "megatron":
        counts_E = chosen_TE.sum(dim=0)
        return (scores_TE.sum(dim=0) * counts_E).sum() * num_experts / (top_k * num_tokens * num_tokens)
    if name in ("megablocks", "swiss_nanotron"):  # one layer of five
        counts_E = chosen_TE.sum(dim=0)
        return num_experts / (5 * num_tokens * top_k) * torch.dot(counts_E, scores_TE.mean(dim=0))
    if name == "deepspeed_topk":
        return (scores_TE.mean(dim=0) * chosen_TE.mean(dim=0)).mean() * num_experts * num_experts / top_k
    if name == "deepspeed_top1":
        return (scores_TE.mean(dim=0) * first_TE.mean(dim=0)).sum() * num_experts
    if name in ("deepspeed_top2", "fastmoe"):
        return (scores_TE.mean(dim=0) * first_TE.mean(dim=0)).mean() * num_experts**2
    if name == "tutel":
        return (scores_TE.sum(dim=0) * (first_TE * num_experts / num_tokens).sum(dim=0)).sum() / num_tokens
    per_group = (t.view(-1, size, num_experts).mean(dim=1) for t in (scores_TE, chosen_TE, first_TE))
    scores_GE, chosen_GE, first_GE = per_group
    if name in ("st_moe", "gshard"):
        return (scores_GE * first_GE).mean() * num_experts**2
    if name == "switch":  # one layer of five
        return (scores_GE * chosen_GE).mean() * num_experts**2 / 5
    if name == "sequence":
        return (scores_GE * (chosen_GE * num_experts / top_k)).sum(dim=1).mean()
    raise AssertionError(name)


@pytest.mark.parametrize("name", sorted(set(CONVENTIONS) - {"hf", "hf_switch", "megatron_global", "fastmoe_switch"}))
def test_conventions_equal_their_published_formula(name):
    """Values and gradients; those of transformers are compared with transformers itself, in tests/hf."""
    logits_TE = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    routing = top_k_routing(logits_TE, 3)
    ours = load_balancing_loss(routing.scores, routing.ids, convention=name, num_layers=5, group_size=4)
    theirs = published(name, logits_TE.softmax(dim=-1), routing.ids, 4)
    torch.testing.assert_close(ours, theirs)
    (ours_grad,), (theirs_grad,) = (torch.autograd.grad(loss, logits_TE) for loss in (ours, theirs))
    torch.testing.assert_close(ours_grad, theirs_grad)


@pytest.mark.parametrize("convention", ["megatron", "hf"])
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_load_balancing_loss_equals_oracle(convention, score_fn):
    logits_TE = torch.randn(50, 6, dtype=torch.float64)
    mask_T = torch.rand(50) < 0.7
    routing = top_k_routing(logits_TE, 2, score_fn=score_fn)
    loss = load_balancing_loss(routing.scores, routing.ids, convention=convention, mask_T=mask_T)
    scores, ids = routing.scores[mask_T].tolist(), routing.ids[mask_T].tolist()
    assert loss.item() == pytest.approx(oracle_load_balancing_loss(scores, ids, 6, convention=convention), rel=1e-12)


@pytest.mark.parametrize(("convention", "balanced", "collapsed"), [("megatron", 1, 4), ("hf", 2, 8)])
def test_values_when_balanced_and_when_collapsed(convention, balanced, collapsed):
    """E = 8, k = 2."""
    even_TE = torch.stack([torch.zeros(8).index_fill(0, torch.tensor([t % 8, (t + 1) % 8]), 0.1) for t in range(64)])
    assert loss_of(even_TE, convention=convention).item() == pytest.approx(balanced)
    assert loss_of(torch.tensor([[30.0, 30.0] + [0.0] * 6] * 64), convention=convention).item() == pytest.approx(
        collapsed
    )


def test_counts_are_taken_before_the_drop_and_of_all_choices():
    """known_failures A-07."""
    scores_TE = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.5, 0.3]])
    ids_TK = torch.tensor([[0], [0], [0], [1]])
    assert load_balancing_loss(scores_TE, ids_TK).item() == pytest.approx(1.3875)
    late_TK = torch.tensor([[0], [0], [3], [1]])  # what capacity 2 leaves: a loss that rewards dropping
    assert load_balancing_loss(scores_TE, late_TK).item() == pytest.approx(1.0125)
    assert expert_counts(torch.tensor([[0, 2], [2, 1]]), 3).tolist() == [1, 1, 2]


def test_tiny_sigmoid_scores_cannot_cheat():
    """known_failures A-06."""
    logits_TE = torch.stack([torch.tensor([1.0, 2.0, 3.0, 4.0]).log().roll(r) - 60 for r in range(4)]).requires_grad_()
    routing = top_k_routing(logits_TE, 1, score_fn="sigmoid")
    loss = load_balancing_loss(routing.scores, routing.ids)
    assert loss.item() == pytest.approx(1.0, rel=1e-6)
    loss.backward()
    assert logits_TE.grad.isfinite().all()
    for low in (-95.0, -110.0, -1000.0):
        logits_TE = torch.full((4, 4), low, requires_grad=True)
        routing = top_k_routing(logits_TE, 1, score_fn="sigmoid")
        loss = load_balancing_loss(routing.scores, routing.ids)
        loss.backward()
        assert loss.item() == pytest.approx(1.0) and logits_TE.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-6, 1e-30])
def test_the_size_of_scores_neither_hides_nor_excuses_imbalance(scale):
    scores_TE = torch.tensor([[0.7, 0.2, 0.1]] * 4)
    ids_TK = torch.tensor([[0]] * 4)
    assert load_balancing_loss(scale * scores_TE, ids_TK).item() == pytest.approx(3 * 0.7)


def test_pooling_over_layers_hides_layers_that_collapse_apart():
    """known_failures A-02: 1.5 and 1.5 per layer, 1.0 pooled. Both are there, by name."""
    layers = [
        Routing(None, torch.full((8, 1), expert), torch.tensor([[0.75, 0.25]] * 8).roll(expert, 1), None)
        for expert in (0, 1)
    ]
    assert model_load_balancing_loss(layers, convention="megatron").item() == pytest.approx(3.0)
    assert model_load_balancing_loss(layers, convention="hf").item() == pytest.approx(1.0)
    one = [layers[0], None]
    assert model_load_balancing_loss(one, convention="hf").item() == pytest.approx(1.5)
    assert model_load_balancing_loss(one, convention="megatron").item() == pytest.approx(1.5)
    assert model_load_balancing_loss([None, None]).item() == 0
    assert model_load_balancing_loss([*layers, None], convention="switch").item() == pytest.approx(1.5)
    assert model_load_balancing_loss([*layers, None], convention="swiss_nanotron").item() == pytest.approx(1.0)
    assert model_load_balancing_loss(layers, convention="hf_switch", group_size=4).item() == pytest.approx(1.0)
    assert model_load_balancing_loss(layers, convention="sequence", group_size=4).item() == pytest.approx(3.0)
    counts_LE = torch.tensor([[8, 0], [4, 4]])
    overall = model_load_balancing_loss(layers, convention="megatron_global", counts_LE=counts_LE)
    assert overall.item() == pytest.approx(1.5 + 1.0)


def test_padding_and_bad_rows_do_not_count():
    logits_TE = torch.randn(20, 6)
    padded_TE = torch.cat([logits_TE, torch.full((5, 6), 9.0), torch.full((2, 6), torch.nan)]).requires_grad_()
    mask_T = torch.tensor([1.0] * 20 + [0] * 5 + [1] * 2)
    routing = top_k_routing(padded_TE, 2, mask_T=mask_T)
    for convention in CONVENTIONS:
        few, many = (needed(convention, group_size=size, counts_E=torch.arange(6)) for size in (20, 27))
        loss = load_balancing_loss(routing.scores, routing.ids, convention=convention, mask_T=mask_T, **many)
        assert loss.item() == pytest.approx(loss_of(logits_TE, convention=convention, **few).item(), rel=1e-6)
    zee = z_loss(routing.logits, mask_T)
    assert zee.item() == pytest.approx(z_loss(logits_TE).item(), rel=1e-6)
    (loss + zee).backward()
    assert padded_TE.grad.isfinite().all() and (padded_TE.grad[20:] == 0).all()


def test_nothing_valid_gives_zero_with_zero_gradient():
    logits_TE = torch.randn(3, 4, requires_grad=True)
    routing = top_k_routing(logits_TE, 2, mask_T=torch.zeros(3))
    loss = load_balancing_loss(routing.scores, routing.ids, mask_T=torch.zeros(3)) + z_loss(logits_TE, torch.zeros(3))
    for convention in CONVENTIONS:
        options = needed(convention, group_size=3, counts_E=torch.ones(4))
        loss = loss + load_balancing_loss(
            routing.scores, routing.ids, mask_T=torch.zeros(3), convention=convention, **options
        )
    loss.backward()
    assert loss.item() == 0 and (logits_TE.grad == 0).all()
    assert z_loss(torch.zeros(0, 4)).item() == 0
    assert load_balancing_loss(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64)).item() == 0
    empty = load_balancing_loss(
        torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64), convention="sequence", group_size=3
    )
    assert empty.item() == 0


def test_losses_pass_gradcheck():
    logits_TE = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    mask_T = torch.tensor([1, 1, 0] * 3)
    counts_E = torch.tensor([1, 2, 3, 4, 0])
    for run in (
        *(
            lambda x, name=name: loss_of(
                x, convention=name, mask_T=mask_T, **needed(name, num_layers=2, group_size=3, counts_E=counts_E)
            )
            for name in CONVENTIONS
        ),
        *(lambda x, name=name: z_loss(x, mask_T, convention=name, num_layers=2) for name in Z_CONVENTIONS),
        lambda x: load_balancing_loss(x.sigmoid(), torch.tensor([[0, 1]] * 9)),
        lambda x: model_load_balancing_loss([make_routing(x), make_routing(2 * x)], convention="hf"),
        lambda x: sequence_load_balancing_loss(x.softmax(-1).view(3, 3, 5), make_routing(x).ids.view(3, 3, 2)),
    ):
        assert torch.autograd.gradcheck(run, logits_TE)


def test_outer_counts_replace_the_batch_s_own():
    scores_TE, ids_TK = torch.rand(4, 3), torch.tensor([[0]] * 4)
    for convention, value in (("megatron", 1.0), ("megatron_global", 1.0), ("hf", 1.0), ("tutel", 1.0)):
        loss = load_balancing_loss(scores_TE, ids_TK, convention=convention, counts_E=torch.tensor([5, 5, 5]))
        assert loss.item() == pytest.approx(value)
    twice = load_balancing_loss(scores_TE, ids_TK.expand(4, 2), convention="hf", counts_E=torch.tensor([5, 5, 5]))
    assert twice.item() == pytest.approx(2.0)


def test_z_loss_of_zero_logits_is_the_square_of_log_e():
    assert z_loss(torch.zeros(4, 8)).item() == pytest.approx(4.3241, abs=1e-4)


def test_z_losses_differ_in_scale_and_over_layers():
    """E = 8; logits of 0 in the first layer of three, a dense one, and logits with logsumexp 1."""
    zero, one = (Routing(None, None, None, x) for x in (torch.zeros(4, 8), torch.full((4, 8), 1 - math.log(8))))
    square = math.log(8) ** 2
    for name in ("st_moe", "megatron", "megablocks"):
        assert z_loss(zero.logits, convention=name).item() == pytest.approx(square)
        assert model_z_loss([zero, None, one], convention=name).item() == pytest.approx(square + 1)
    assert z_loss(zero.logits, convention="hf_switch", num_layers=2).item() == pytest.approx(square / 2)
    assert model_z_loss([zero, None, one], convention="hf_switch").item() == pytest.approx((square + 1) / 2)
    assert z_loss(zero.logits, convention="swiss_nanotron", num_layers=1).item() == pytest.approx(0.5405, abs=1e-4)
    assert model_z_loss([zero, None, one], convention="swiss_nanotron").item() == pytest.approx((square + 1) / 3 / 8)
    assert model_z_loss([None]).item() == 0


def test_expert_counts_leave_out_sentinels_and_padding():
    ids_TK = torch.tensor([[0, 3], [-1, 1], [1, 2], [7, 0]])
    assert expert_counts(ids_TK, 3).tolist() == [2, 2, 1]
    assert expert_counts(ids_TK, 3, torch.tensor([1, 1, 0, 1])).tolist() == [2, 1, 0]
    assert expert_counts(torch.zeros(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_bias_moves_against_the_load():
    bias_E = torch.zeros(4)
    update_expert_bias_(bias_E, torch.tensor([6, 2, 4, 4]), 0.001)
    torch.testing.assert_close(bias_E, torch.tensor([-0.001, 0.001, 0.0, 0.0]))


def test_the_centred_bias_update_keeps_the_sum():
    """torchtitan: counts (9, 1, 1, 1) move by (-1, 1, 1, 1) less their mean of 1/2."""
    bias_E = torch.tensor([0.5, 0.0, -0.5, 0.0])
    update_expert_bias_(bias_E, torch.tensor([9, 1, 1, 1]), 0.01, centred=True)
    torch.testing.assert_close(bias_E, torch.tensor([0.485, 0.005, -0.495, 0.005]))
    assert bias_E.sum().item() == pytest.approx(0.0, abs=1e-7)


def test_max_violation():
    assert max_violation(torch.tensor([4, 4, 4, 4])).item() == 0
    assert max_violation(torch.tensor([16, 0, 0, 0])).item() == pytest.approx(3.0)
    assert max_violation(torch.tensor([6, 2, 4, 4])).item() == pytest.approx(0.5)
    assert max_violation(torch.zeros(4, dtype=torch.int64)).item() == 0


@pytest.mark.parametrize(
    ("coef", "source", "target", "top_k", "num_layers", "value"),
    [
        (0.001, "hf", "megatron", 8, 48, 1.6667e-4),  # Qwen3-30B-A3B in Megatron-LM
        (0.001, "hf", "megablocks", 8, 48, 0.008),
        (0.001, "hf", "swiss_nanotron", 8, 16, 0.008),
        (0.01, "megatron", "hf", 2, 32, 0.16),
        (0.01, "switch", "hf", 1, 12, 0.01),
        (0.01, "deepspeed_topk", "megatron", 6, 27, 0.01),
        (0.01, "deepspeed_top1", "megatron", 1, 12, 0.01),  # the first choice is the only one
    ],
)
def test_equivalent_coefficients_by_hand(coef, source, target, top_k, num_layers, value):
    found = equivalent_coefficient(coef, source=source, target=target, top_k=top_k, num_layers=num_layers)
    assert found == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("hf", "tutel", "'tutel' differs, it counts only the first of top_k=2 choices"),
        ("sequence", "hf", "'sequence' differs, it counts over each sequence"),
        ("megatron", "megatron_global", "'megatron_global' differs, it counts over a larger batch"),
        ("fastmoe_switch", "megatron", "'fastmoe_switch' differs, it counts what capacity kept"),
        ("hf", "hff", "convention must be one of"),
    ],
)
def test_other_directions_have_no_equivalent_coefficient(source, target, words):
    with pytest.raises(ValueError, match=words):
        equivalent_coefficient(0.01, source=source, target=target, top_k=2, num_layers=4)


@pytest.mark.parametrize(
    ("convention", "options", "words"),
    [
        ("megablocks", {}, "convention='megablocks' needs num_layers"),
        ("switch", {}, "convention='switch' needs num_layers"),
        ("st_moe", {}, "convention='st_moe' needs group_size"),
        ("megatron_global", {}, "convention='megatron_global' needs counts_E"),
        ("sequence", {"group_size": 3}, "group_size=3 must divide the 4 tokens"),
        ("gshard", {"group_size": 2, "counts_E": torch.ones(3)}, "cannot use counts_E"),
        ("sequence", {"group_size": 2, "counts_E": torch.ones(3)}, "cannot use counts_E"),
    ],
)
def test_missing_and_impossible_arguments_are_named(convention, options, words):
    with pytest.raises(ValueError, match=words):
        load_balancing_loss(SCORES_TE, IDS_TK, convention=convention, **options)


def test_models_name_what_is_missing():
    routing = Routing(None, IDS_TK, SCORES_TE, SCORES_TE)
    for convention, options, words in (
        ("hf_switch", {}, "convention='hf_switch' needs group_size"),
        ("st_moe", {}, "convention='st_moe' needs group_size"),
        ("megatron_global", {}, "convention='megatron_global' needs counts_LE"),
        ("hf", {"counts_LE": torch.ones(1, 3)}, "convention='hf' pools layers: it cannot use counts_LE"),
    ):
        with pytest.raises(ValueError, match=words):
            model_load_balancing_loss([routing], convention=convention, **options)
    with pytest.raises(ValueError, match="z-loss convention='hf_switch' needs num_layers"):
        z_loss(SCORES_TE, convention="hf_switch")
    with pytest.raises(ValueError, match=r"z-loss convention must be one of .*'tutel'"):
        model_z_loss([routing], convention="tutel")


SIZES = {
    "seed": st.integers(0, 2**31),
    "num_experts": st.integers(2, 9),
    "top_k": st.integers(1, 4),
    "length": st.integers(1, 6),
}
few = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def draw(seed, num_experts, top_k, length):
    """Logits of three sequences in float64, and a mask that leaves each sequence a token."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(3 * length, num_experts, generator=generator, dtype=torch.float64)
    mask_T = torch.rand(3 * length, generator=generator) < 0.7
    mask_T[::length] = True
    return logits_TE, mask_T, min(top_k, num_experts), generator


def every_loss(logits_TE, mask_T, top_k, length, counts_E):
    routing = top_k_routing(logits_TE, top_k, mask_T=mask_T)
    return torch.stack(
        [
            load_balancing_loss(
                routing.scores,
                routing.ids,
                convention=name,
                mask_T=mask_T,
                **needed(name, num_layers=2, group_size=length, counts_E=counts_E),
            )
            for name in CONVENTIONS
        ]
        + [z_loss(logits_TE, mask_T)]
    )


@few
@given(**SIZES)
def test_permuting_experts_or_sequences_changes_nothing(seed, num_experts, top_k, length):
    logits_TE, mask_T, k, generator = draw(seed, num_experts, top_k, length)
    counts_E = torch.randint(1, 9, (num_experts,), generator=generator)
    before = every_loss(logits_TE, mask_T, k, length, counts_E)
    order_E = torch.randperm(num_experts, generator=generator)
    torch.testing.assert_close(every_loss(logits_TE[:, order_E], mask_T, k, length, counts_E[order_E]), before)
    order_T = torch.arange(3 * length).view(3, length)[torch.randperm(3, generator=generator)]
    order_T = order_T[:, torch.randperm(length, generator=generator)].flatten()
    torch.testing.assert_close(every_loss(logits_TE[order_T], mask_T[order_T], k, length, counts_E), before)


@few
@given(**SIZES)
def test_a_constant_on_a_softmax_row_changes_no_balancing_loss(seed, num_experts, top_k, length):
    logits_TE, mask_T, k, generator = draw(seed, num_experts, top_k, length)
    counts_E = torch.ones(num_experts)
    shift_T1 = 3 * torch.randn(3 * length, 1, generator=generator, dtype=torch.float64)
    before, after = (every_loss(x, mask_T, k, length, counts_E) for x in (logits_TE, logits_TE + shift_T1))
    torch.testing.assert_close(after[:-1], before[:-1])
    assert (after[-1] - before[-1]).abs() > 0  # the z-loss is there to see it


@few
@given(**SIZES)
def test_counts_sum_to_valid_tokens_times_k(seed, num_experts, top_k, length):
    logits_TE, mask_T, k, _ = draw(seed, num_experts, top_k, length)
    logits_TE[0, 0] = torch.nan
    routing = top_k_routing(logits_TE, k, mask_T=mask_T)
    assert expert_counts(routing.ids, num_experts).sum() == (mask_T.sum() - 1) * k
    assert expert_counts(top_k_routing(logits_TE, k).ids, num_experts, mask_T).sum() == (mask_T.sum() - 1) * k


@few
@given(name=st.sampled_from(ALL_CHOICES), num_layers=st.integers(1, 5), **SIZES)
def test_all_choice_conventions_equal_a_multiple_of_megatron(name, num_layers, seed, num_experts, top_k, length):
    """In the gradient on every layer, when layers route alike."""
    logits_TE, mask_T, k, _ = draw(seed, num_experts, top_k, length)
    layers = [logits_TE.clone().requires_grad_() for _ in range(num_layers)]
    coef = equivalent_coefficient(1.0, source="megatron", target=name, top_k=k, num_layers=num_layers)
    grads = []
    for convention, scale in (("megatron", 1.0), (name, coef)):
        loss = model_load_balancing_loss([make_routing(x, k) for x in layers], convention=convention, mask_T=mask_T)
        grads.append(torch.stack(torch.autograd.grad(scale * loss, layers)))
    torch.testing.assert_close(grads[1], grads[0])


def test_unknown_convention_is_named():
    with pytest.raises(ValueError, match=r"convention must be one of .*'switchy'"):
        load_balancing_loss(torch.rand(2, 2), torch.zeros(2, 1, dtype=torch.int64), convention="switchy")
