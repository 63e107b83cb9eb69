"""What administrators ask of the HTTP process; what they ask of the scheduler is in ../../scheduler.

| what SGLang does                                  | what stands in its place         | where       |
|---------------------------------------------------|----------------------------------|-------------|
| `/server_info` shows the API keys                 | it does not                      | access.py   |
| unloading an adapter waits for ever, or is undone | it waits for who runs, and holds | adapters.py |
| of N replicas one says whether a flush was done   | all do                           | flushes.py  |
| a profile that cannot be made ends the scheduler  | 400                              | profiles.py |
"""
