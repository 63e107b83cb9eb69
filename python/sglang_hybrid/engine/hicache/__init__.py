"""SGLang's hierarchical cache (HiCache): a second tier of the radix cache, in host memory.

| what SGLang does                           | what stands in its place                        | where         |
|--------------------------------------------|-------------------------------------------------|---------------|
| starts with a tier that cannot work        | the launcher says why, before a model loads     | checks.py     |
| ages the host tier by last use             | the score of the device, in an index of its own | tier.py       |
| misses copies of states, restores too much | a copy of each state, no restore without slots  | tier.py       |
| two components see one tier each           | they see both, and keep the order of both       | components.py |
| copies by kernels of an accelerator        | on a CPU, one tensor indexed by another         | copies.py     |
| stores by a model's name, ends on a fault  | by its weights and types; a fault is a miss     | storage.py    |
"""
