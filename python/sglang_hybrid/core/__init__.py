"""Costs, configuration, errors and clocks: standard library only, imported by every other package."""
