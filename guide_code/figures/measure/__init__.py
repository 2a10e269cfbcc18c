"""Commands that measure what a figure shows and write it to `docs/data/results`; each figure reads its file there."""
