"""The hybrid radix tree: token sequences whose nodes may hold states, and the marks at their positions.

| what                                        | where         |
|---------------------------------------------|---------------|
| sequences of token numbers                  | tokens.py     |
| what is known of one position of a sequence | mark.py       |
| an edge of the tree and what it holds       | node.py       |
| match, insert, split, lock, drop            | radix_tree.py |
| what must hold at any time                  | check.py      |
"""
