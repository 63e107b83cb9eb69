"""Trees of candidates are those of SGLang's kernels."""


def test_links_masks_and_walks_are_those_of_sglangs_kernels(interpreted):
    assert interpreted("tests.unit.engine_cpu.tree_oracle") == "60"
