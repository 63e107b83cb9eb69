"""The hybrid radix prefix cache as pure decisions: what to keep, what to drop, what to restart from."""
