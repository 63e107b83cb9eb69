"""What runs where HTTP requests come in: SGLang's first process, or each of its HTTP workers.

| what SGLang does             | what stands in its place               | where       |
|------------------------------|----------------------------------------|-------------|
| HTTP workers load no plugin  | they prove every hook or do not serve  | workers.py  |
| usage counts cached tokens   | and says why the others missed         | usage.py    |

`hooks.py` registers all of it; `requests.py` checks the boundaries that requests name.
"""
