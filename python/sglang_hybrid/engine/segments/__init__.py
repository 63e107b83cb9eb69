"""Prompts composed of segments, in the scheduler: `segment/` decides, this does it (docs/segments.md).

| what                                              | where                                           |
|---------------------------------------------------|-------------------------------------------------|
| what a request marks, how its prompt is composed  | marked.py, composer.py                          |
| which pass comes next                             | schedule.py, hooks.py                           |
| a pass as tensors                                 | batch.py, draft.py                              |
| its layers: linear, attention, a head that drafts | forward.py, linear.py, attention.py, heads.py   |
| what these are made of                            | stages.py, latents.py, rope.py, warm.py         |
| entries, and the memory they lie in               | store.py, room.py, operators.py, settling.py    |
| what other servers and the HTTP process ask for   | listing.py, exchange.py, parcels.py, weights.py |
| what it takes, and what it cannot be served with  | build.py, refusals.py                           |

What clients and other servers say of segments is in ../frontend/segments.
"""
