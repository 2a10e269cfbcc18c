"""Count what a block of code asks of ``torch.distributed``: calls by name, and bytes given to all-to-alls."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """``calls``: operators by name; ``bytes``: input bytes of collectives by name."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.calls[name] += 1
        if name.startswith("c10d.alltoall_base_"):
            self.bytes["all_to_all"] += args[1].nbytes
        return function(*args, **(kwargs or {}))

    @property
    def collectives(self) -> Counter:
        return Counter({name: n for name, n in self.calls.items() if name.startswith(("c10d.", "_c10d_functional."))})


def relative_rms(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is wanted; of the difference alone where that is 0."""
    difference = (actual.double() - wanted.double()).square().mean().sqrt() if wanted.numel() else torch.zeros(())
    scale = wanted.double().square().mean().sqrt() if wanted.numel() else torch.zeros(())
    return float(difference / scale) if scale > 0 else float(difference)
