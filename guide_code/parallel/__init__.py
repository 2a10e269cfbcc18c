"""The MoE part of distributed training, and thin, explained uses of ``torch.distributed``."""
