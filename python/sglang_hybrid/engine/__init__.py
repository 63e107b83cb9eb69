"""The adapter to SGLang: the only package that imports it."""
