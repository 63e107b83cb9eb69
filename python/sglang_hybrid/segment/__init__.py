"""Segments: stretches of prompts that are reused at any position, behind any text. Decisions only, no tensors.

| what                                                            | where       |
|-----------------------------------------------------------------|-------------|
| a prompt that clients split by a separator                      | split.py    |
| seams, interiors, and what a client may mark                    | geometry.py |
| what an entry is known by, in the index and in the prefix tree  | keys.py     |
| the memory of entries: blocks of equal size, of three kinds     | blocks.py   |
| blocks that are cut into slots: KV of tokens, transitions       | slabs.py    |
| where blocks come from: a fixed number, or an elastic budget    | source.py   |
| what keeps entries until the passes over them have run          | leases.py   |
| entries, their reuse and their eviction                         | index.py    |
| the segments of one prompt, and how far a pass of it goes       | prompt.py   |
| what one pass runs, copies and jumps over                       | passes.py   |
| which server computes which cold segment                        | dispatch.py |

Source: HYPIC (papers.md); where this goes beyond it, decisions.md says why.
"""
