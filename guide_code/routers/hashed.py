"""Hash routing: which experts a token gets depends on its word alone, by a table that is never trained.

Hash layers, Roller et al. 2021 (arXiv:2106.04426). The first layers of DeepSeek-V4 choose by such a table
and learn only the weights (transformers ``models/deepseek_v4/modeling_deepseek_v4.py``, ``DeepseekV4HashRouter``).
Copy with top_k.py into one package: needs torch only.

T tokens, V vocabulary, E experts, K choices per token, D hidden size.
"""

import heapq

import torch
from torch import Tensor

from .top_k import TopKRouter


def hash_table(
    vocab_size: int, num_experts: int, top_k: int, *, counts_V: Tensor | None = None, seed: int = 0
) -> Tensor:
    """A table (V, K) of ``top_k`` distinct experts for each token id, the same on every machine.

    Args:
        vocab_size: number V of token ids.
        num_experts: number E of experts.
        top_k: experts per token id.
        counts_V: how often each id occurs in the training text. The most frequent then go first, each to the experts
            with the least load so far (the balanced hash of Roller et al.). Without it the experts are random, and
            frequent words make the load uneven.
        seed: of the random table.

    Raises:
        ValueError: ``top_k`` exceeds ``num_experts``, or there is not one count per id.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in [1, num_experts={num_experts}], got {top_k}")
    if counts_V is None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(vocab_size, num_experts, generator=generator, device="cpu")
        return rows.argsort(dim=-1)[:, :top_k].clone()
    if counts_V.shape != (vocab_size,):
        raise ValueError(f"counts must have shape ({vocab_size},), one per token id, got {tuple(counts_V.shape)}")
    loads = [(0, expert) for expert in range(num_experts)]
    table = torch.empty(vocab_size, top_k, dtype=torch.int64, device="cpu")
    counts = counts_V.tolist()
    for token in sorted(range(vocab_size), key=lambda token: -counts[token]):
        lightest = [heapq.heappop(loads) for _ in range(top_k)]
        table[token] = torch.tensor([expert for _, expert in lightest], device="cpu")
        for load, expert in lightest:
            heapq.heappush(loads, (load + max(counts[token], 1), expert))  # unseen words are spread as well
    return table


class HashRouter(TopKRouter):
    """Experts from a table by token id; the weights still come from a learned linear layer.

    With ``top_k=1`` and ``norm_topk_prob`` the weight is exactly 1, as in the hash layers of Roller et al.

    Args:
        hidden_size: width D of a token.
        num_experts: number E of experts.
        table_VK: (V, K) int64, the experts of each token id, distinct in a row; from :func:`hash_table`, or
            ``tid2eid`` of a DeepSeek-V4 checkpoint. It is the buffer ``table``, kept in the state dict: a module
            made on the meta device gets it back with the checkpoint.
        options: ``bias``, ``jitter``, ``score_fn``, ``norm_topk_prob`` and ``routed_scaling_factor`` of
            :class:`TopKRouter`. DeepSeek-V4: "sqrtsoftplus", normalised, 1.5.

    Raises:
        ValueError: the table is not (V, K) int64 with ids in [0, E), or an option is out of range.
    """

    table: Tensor

    def __init__(self, hidden_size: int, num_experts: int, table_VK: Tensor, **options):
        if table_VK.ndim != 2 or table_VK.dtype != torch.int64:
            raise ValueError(f"the table must be int64 (V, K), got {table_VK.dtype} {tuple(table_VK.shape)}")
        if table_VK.numel() and not 0 <= table_VK.min() <= table_VK.max() < num_experts:
            raise ValueError(
                f"the table holds expert {table_VK.min()} to {table_VK.max()}, but num_experts={num_experts}"
            )
        super().__init__(hidden_size, num_experts, table_VK.shape[1], **options)
        self.register_buffer("table", table_VK.to(self.weight.device))

    def choose(self, logits_TE: Tensor, mask_T: Tensor | None, tokens_T: Tensor | None) -> Tensor:
        """The rows of the table, (T, K).

        Raises:
            ValueError: no token ids were given, or not one per token.
            IndexError: an id of a real token is outside the table.
        """
        if tokens_T is None or tokens_T.shape != logits_TE.shape[:1]:
            got = "none" if tokens_T is None else tuple(tokens_T.shape)
            raise ValueError(f"a hash router needs the id of each of the {logits_TE.shape[0]} tokens, got {got}")
        if mask_T is not None:
            tokens_T = torch.where(mask_T.bool(), tokens_T, 0)  # padding may hold -100
        return self.table.index_select(0, tokens_T)  # unlike table[tokens_T], it refuses negative ids
