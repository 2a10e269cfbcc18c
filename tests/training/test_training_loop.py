import math
import os
import signal

import pytest
import torch

from guide_code.balance import expert_counts
from guide_code.build import build_model
from guide_code.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from guide_code.config import dense_twin, override
from guide_code.corpus import load_corpus
from guide_code.presets import tiny
from guide_code.training.config import TrainConfig
from guide_code.training.loop import TrainingStopped, train
from guide_code.training.losses import next_token_loss, validation_loss
from guide_code.training.optimizer import learning_rate, make_optimizer

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_size": 16, "num_experts": 4}
CONFIG = override(tiny(), {**SMALL, "expert_bias_rate": 0.001, "use_expert_bias": True})
RUN = TrainConfig(steps=6, batch_size=4, sequence_length=16, warmup_steps=2, validate_every=3, save_every=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(6):
        lines = [f"def f{i}(x):\n    return x + {i * number}\n" for i in range(40)]
        (folder / f"file{number}.py").write_text("\n".join(lines))
    return load_corpus(folder, vocab_size=300, cache_dir=folder / ".cache")


def make(config=CONFIG):
    torch.manual_seed(0)
    return build_model(config)


def losses(history):
    return [metrics["loss"] for metrics in history]


def test_training_lowers_the_loss_and_reports_what_it_says(corpus):
    history = train(make(), corpus, TrainConfig(steps=40, batch_size=4, sequence_length=32, warmup_steps=5))
    assert history[-1]["loss"] < 0.6 * history[0]["loss"] and history[-1]["validation_loss"] < 4
    last = history[-1]
    assert last["step"] == 40 and last["tokens"] == 40 * 4 * 32
    assert last.keys() >= {
        "load_balancing",
        "z_loss",
        "max_violation",
        "counts",
        "grad_norm",
        "lr",
        "tokens_per_second",
    }
    assert [sum(counts) for counts in last["counts"]] == [4 * 32 * 2] * 2


def test_auxiliary_losses_are_apart_from_the_language_model_s(corpus):
    config = override(CONFIG, {"load_balancing_coef": 100.0, "z_loss_coef": 100.0})
    first = [
        train(make(c), corpus, TrainConfig(steps=1, batch_size=4, sequence_length=16))[0] for c in (CONFIG, config)
    ]
    assert first[0]["loss"] == first[1]["loss"] and first[0]["grad_norm"] < first[1]["grad_norm"]


def test_accumulation_gives_the_same_step(corpus):
    """Losses that are linear in the tokens; the balancing loss is defined per micro-batch, so it is off here."""
    config = override(CONFIG, {"load_balancing_coef": 0.0, "z_loss_coef": 0.1})
    results = []
    for accumulate in (1, 2, 4):
        model = make(config)
        run = TrainConfig(steps=2, batch_size=4, sequence_length=16, accumulate=accumulate)
        history = train(model, corpus, run)
        results.append((losses(history), history[0]["counts"], model.blocks[0].ffn.router.expert_bias.clone()))
        assert history[0]["z_loss"] == pytest.approx(train(make(config), corpus, run)[0]["z_loss"])
    for loss, counts, bias in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5) and counts == results[0][1]
        assert torch.equal(bias, results[0][2])


def test_resume_is_bit_equal(corpus, tmp_path):
    whole = train(make(), corpus, RUN)
    model = make()
    optimizer = make_optimizer(model, RUN)

    def save(step):
        save_checkpoint(tmp_path, step, model, CONFIG, optimizer)
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, corpus, RUN, optimizer=optimizer, on_save=save)
    torch.manual_seed(99)
    resumed = build_model(CONFIG)
    optimizer = make_optimizer(resumed, RUN)
    step = load_checkpoint(checkpoints(tmp_path)[-1], resumed, CONFIG, optimizer)
    rest = train(resumed, corpus, RUN, first_step=step, optimizer=optimizer)
    assert losses(rest) == losses(whole)[3:] and rest[-1]["validation_loss"] == whole[-1]["validation_loss"]


def test_a_dense_model_sees_the_same_data_and_has_no_balance(corpus):
    history = train(make(dense_twin(CONFIG)), corpus, RUN)
    assert "max_violation" not in history[0] and "counts" not in history[0]
    seen = []
    for config in (CONFIG, dense_twin(CONFIG)):
        model = make(config)
        model.embedding.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].clone()))
        train(model, corpus, RUN)
    half = len(seen) // 2
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


def test_validation_is_in_evaluation_mode_and_counts_no_load(corpus):
    model = make().train()
    value = validation_loss(model, corpus, RUN)
    assert model.training and value == validation_loss(model, corpus, RUN)
    assert model.blocks[0].ffn.balancer.counts.sum() == 0
    assert value == pytest.approx(math.log(300), rel=0.1)


def test_counts_are_those_of_the_router(corpus):
    model = make()
    tokens, _ = corpus.train.batch(4, 16, torch.Generator().manual_seed(0))
    routing = model(tokens[:, :-1]).routings[0]
    history = train(make(), corpus, RUN)
    assert history[0]["counts"][0] == expert_counts(routing.ids, 4).tolist()


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    values = [learning_rate(step, config) for step in range(101)]
    assert values[0] == pytest.approx(0.1) and values[9] == values[10] == 1.0
    assert values[100] == pytest.approx(0.1) and values[10:] == sorted(values[10:], reverse=True)


def test_decay_is_on_matrices_only():
    model = make()
    decayed, plain = make_optimizer(model, RUN).param_groups
    assert all(p.ndim >= 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.ndim < 2 for p in plain["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_a_loss_that_is_no_number_stops_with_step_and_last_good_state(corpus):
    model = make()

    def poison(metrics):
        if metrics["step"] == 4:
            with torch.no_grad():
                model.norm.weight.fill_(torch.nan)

    with pytest.raises(TrainingStopped, match=r"loss nan .* at step 5; the last good state is after step 3"):
        train(model, corpus, RUN, on_step=poison, on_save=lambda step: None)


def test_too_small_a_vocabulary_or_model_is_refused(corpus):
    with pytest.raises(ValueError, match="corpus has 300 token ids but the model's vocab_size is 200"):
        train(make(override(CONFIG, {"vocab_size": 200})), corpus, RUN)
    with pytest.raises(ValueError, match="sequence_length=16 exceeds the model's max_length=8"):
        train(make(override(CONFIG, {"max_length": 8})), corpus, RUN)
    for fields, words in (
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"accumulate": 3}, "accumulate=3 must divide batch_size=8"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainConfig(**fields)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_finishes_the_step_saves_and_stops(corpus, number):
    saved = []

    def press(metrics):
        if metrics["step"] == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    history = train(make(), corpus, RUN, on_step=press, on_save=saved.append)
    assert len(history) == 3 and saved == [3] and "validation_loss" in history[-1]
    assert signal.getsignal(number) is before


def test_next_token_loss_is_the_mean_over_shifted_targets():
    model = make().eval()
    tokens_BS = torch.randint(0, 300, (2, 7))
    logits = model(tokens_BS[:, :-1]).logits.log_softmax(-1)
    by_hand = -torch.stack([logits[b, s, tokens_BS[b, s + 1]] for b in range(2) for s in range(6)]).mean()
    torch.testing.assert_close(next_token_loss(model, tokens_BS), by_hand)
