"""What a training run will need, before it is started: :mod:`plan` computes it, :mod:`suggest` searches layouts."""
