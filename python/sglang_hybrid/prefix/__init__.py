"""The hybrid radix prefix cache as pure decisions: what to keep, what to drop, what to resume from."""

from pathlib import Path

from sglang_hybrid.core.compiled import form

FORM = form(Path(__file__).parent)
