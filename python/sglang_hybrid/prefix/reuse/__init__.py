"""What comes back, and when: learned from a bounded history of requests that outlives eviction.

| what                                              | where      |
|---------------------------------------------------|------------|
| the sequences and marks of past requests          | history.py |
| marks in order of their last use                  | chain.py   |
| which marks are expected to behave alike          | classes.py |
| uses and waiting times by class and age, and odds | table.py   |
"""
