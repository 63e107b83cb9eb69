"""Speculative decoding on a plain CPU: what SGLang's CPU path takes from its compiled extension, in PyTorch.

A request's *tree* has `nodes` candidates: node 0 is the token that was decided last, the others are guesses, each with
an earlier node as its parent. One pass of the model computes all of them (*verification*), and the path from node 0
along which the model agrees with the guesses is accepted. A chain is a tree in which every node has one child.

| what                                              | where         |
|---------------------------------------------------|---------------|
| links, masks and the accepted path of a tree      | trees.py      |
| the same where tokens are drawn, not the greatest | sampling.py   |
| KV of candidates: slots and copies                | kv_slots.py   |
| attention of candidates over their ancestors      | attention.py  |
| states and windows of candidates                  | candidates.py |
| attention of the steps of a draft model           | drafts.py     |

Index work is done in lists: a tree has a few dozen nodes.
"""
