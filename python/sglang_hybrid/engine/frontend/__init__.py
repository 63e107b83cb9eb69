"""What stands between clients and the engine, in SGLang's first process or each of its HTTP workers.

| what SGLang does                                      | what stands in its place             | where           |
|-------------------------------------------------------|--------------------------------------|-----------------|
| mistakes of clients are 500s at some endpoints        | 400, in the form of the endpoint     | endpoints.py    |
| a level of logs that there is not fails every request | 400; nothing is changed              | endpoints.py    |
| streams of several samples leave states behind        | nothing is left when they are over   | requests.py     |
| marks of chat clients (`cache_control`) mean nothing  | boundaries of the prompt             | chat.py, marks/ |
| `document` blocks and marks of segments are unknown   | text, and token ranges of the prompt | segments/       |

Every endpoint passes `endpoints.py`, every request `requests.py`, every chat `chat.py`. They call

- `validation`: what one request may ask; its `limits.py` holds the bounds
- `marks` and `segments`: what clients mark in a prompt, and which tokens that is
- `tokenization`: texts on their way to tokens
- `reporting`: `usage` of answers, names and labels of metrics

and beside them stand `server`, the HTTP processes themselves, and `admin`, what administrators ask of them. Each has
such a table. What has to be checked in the scheduler is in ../scheduler. `engine/surface/frontend.py` registers all.
"""
