"""The two readers in plain PyTorch, for training: forward passes over whole sequences, no cache."""
