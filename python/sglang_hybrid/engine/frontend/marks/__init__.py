"""Marks and hints in the words of chat clients, and where in the rendered prompt the marked content ends."""
