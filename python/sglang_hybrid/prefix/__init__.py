"""The hybrid radix prefix cache as pure decisions: what to keep, what to drop, what to restart from."""

from sglang_hybrid.core.compiled import use

FORM = use(__path__)
