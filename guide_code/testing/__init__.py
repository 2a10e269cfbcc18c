"""The float64 oracle and the contract that every backend of experts must keep. Use them on your own backend."""
