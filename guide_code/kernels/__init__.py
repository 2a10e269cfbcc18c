"""Triton kernels of the fused experts: start with ``layer.py``, which calls them in order."""
