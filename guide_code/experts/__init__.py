"""Ways to compute the chosen experts. Every file holds a function and a thin module with the same contract."""
