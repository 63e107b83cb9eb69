"""Everything this package uses of SGLang: what it imports, extends and reaches (`uses`), hooks and replaces (`hooks`).

`hooks` puts the lists of the others into one order: those of a package of `engine` are in the file of its name.

The lists to go through for another version of SGLang. `check` says what a version lacks, `registration` registers the
hooks; `tests/unit/engine/test_surface.py` fails for what the code uses without a row, and for a row that nobody uses.

Targets are 'module:attribute', modules of SGLang without its name in front. Owners are modules of `engine`, or the
launcher and the benchmark client. `when` is what has to be asked for: "cpu", "elastic", "segments", "rust",
"compressed", the name of a transfer engine, or "" for always.
"""
