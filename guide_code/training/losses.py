"""The language model's loss, on a batch and on the validation split.

B batch, S sequence, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from guide_code.corpus import Corpus
from guide_code.training.config import TrainConfig
from guide_code.transformer import Transformer


def next_token_loss(model: Transformer, tokens_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats of predicting each token from those before it; ``tokens_BS`` holds S + 1."""
    logits_BSV = model(tokens_BS[:, :-1]).logits
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Transformer, corpus: Corpus, config: TrainConfig) -> float:
    """Mean loss over the first ``validation_batches`` batches of the validation split, in evaluation mode."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    windows = corpus.validation.windows(config.batch_size, config.sequence_length, config.validation_batches)
    losses = [(next_token_loss(model, tokens_BS.to(device)).item(), len(tokens_BS)) for tokens_BS, _ in windows]
    model.train(was_training)
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)
