"""Training step by step: settings, optimizer, losses, balance, the loop. ``guide_code.train`` is the command."""
