"""Mixture-of-Experts Transformers to read, run and copy. Import from the modules; nothing is re-exported."""
