"""Prompts on their way to tokens.

| what SGLang does                                    | what stands in its place                | where          |
|-----------------------------------------------------|-----------------------------------------|----------------|
| a text of any length is tokenised in the event loop | long ones are not, endless ones refused | texts.py       |
| a turn of a chat is tokenised from its beginning    | only what is new is                     | token_cache.py |
| prompts of a list are one piece of work             | others have their turn in between       | processing.py  |
| what a processor of images raises is a 500          | 400                                     | processing.py  |
| routers know no page of a prompt                    | `/tokenize` names them                  | pages.py       |
"""
