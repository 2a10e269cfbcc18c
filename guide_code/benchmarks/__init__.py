"""What ``moe-guide bench`` measures: experts, Switch layers, conversion. Times of one process, taken in turns."""
