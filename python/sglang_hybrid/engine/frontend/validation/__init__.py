"""What one request may ask, checked before SGLang sees it.

| what SGLang does                                       | what stands in its place             | where            |
|--------------------------------------------------------|--------------------------------------|------------------|
| a number, type or size out of range ends the scheduler | 400, with the remedy                 | arrival.py       |
| token ids outside the vocabulary do too                | 400, once the prompt is tokens       | prompt.py        |
| sampling parameters pass unseen                        | they have SGLang's types, and bounds | sampling.py      |
| a stop pattern may backtrack for ever                  | its steps are counted, its tail ends | stop_patterns.py |
| an image may be any file of the server, of any size    | one below a folder, up to a size     | media.py         |
| a logit processor is read in the scheduler             | 400 for one that cannot be read      | processors.py    |
| an id may be a health check's                          | 400                                  | ids.py           |
| a body has any length                                  | 413 beyond a limit                   | bodies.py        |

`limits.py` holds the bounds; docs/security.md lists them.
"""
