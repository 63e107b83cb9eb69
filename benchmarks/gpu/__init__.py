"""A day on a machine with an NVIDIA card, in parts of at most nine minutes: `scripts/gpu`."""
