"""The experts of transformers' Switch models with their tokens sorted once, instead of searched for once per expert.

Switch Transformers, Fedus et al. 2021 (arXiv:2101.03961). transformers 5 keeps E separate pairs of linear layers and,
for each expert in use, scans a one-hot mask over all tokens, copies its rows out and adds its outputs to a full-width
sum; in training each of those copies returns a full-width gradient.

T tokens, D hidden size, E experts, N tokens that an expert takes (one choice each; the rest were dropped).
"""

import torch
from torch import Tensor
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts


class SortedSwitchExperts(SwitchTransformersExperts):
    """Same parameters, values, gradients and random numbers as its parent class, in fewer steps.

    Experts run in ascending order and each gets its tokens in order of position, as in the parent, so that matrix
    products see the same rows and dropout draws the same numbers: on a CPU all results are equal to the bit. Experts
    run as modules: hooks (offloading), adapters and quantised layers keep working. An idle expert is not touched: its
    weights are not fetched and its gradient stays None.
    """

    def forward(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        """(T, D) in the dtype of ``hidden_states``; 0 for a token that the router dropped.

        Args:
            hidden_states: (T, D).
            selected_experts: (T, 1, E), one-hot; a row of zeros is a dropped token.
            routing_weights: (T, 1).
        """
        # The transposed mask, read row by row, lists the tokens by expert and then by position: sorted as it is found.
        expert_N, token_N = selected_experts[:, 0].T.nonzero().unbind(1)
        counts = torch.bincount(expert_N, minlength=self.num_experts).tolist()
        used = [expert for expert, count in enumerate(counts) if count]
        if len(used) == 1 and len(token_N) == len(hidden_states):  # decoding: one token, nothing to sort
            y_TD = self[f"expert_{used[0]}"](hidden_states) * routing_weights
            return y_TD.to(hidden_states.dtype)

        rows_ND = hidden_states.index_select(0, token_N)
        rows = rows_ND.split([counts[expert] for expert in used])
        # With every token dropped there is nothing to join: the empty rows keep the output in the graph.
        y_ND = torch.cat([self[f"expert_{e}"](r) for e, r in zip(used, rows, strict=True)] if used else [rows_ND])
        y_ND = (y_ND * routing_weights.index_select(0, token_N)).to(hidden_states.dtype)
        return torch.zeros_like(hidden_states).index_copy(0, token_N, y_ND)
