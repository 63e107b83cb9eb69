"""Never far behind LRU: any order of eviction, replaced by recency while it costs too much.

| what                                            | where     |
|-------------------------------------------------|-----------|
| the account, the bound and its proof            | guard.py  |
| what LRU would hold now, as metadata            | shadow.py |
| candidates by last use, behind the order itself | heap.py   |
"""
