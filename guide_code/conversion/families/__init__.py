"""One file per family: its table of names, and its config.json in both directions."""
