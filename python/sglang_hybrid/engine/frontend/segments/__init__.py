"""Segments in the words of clients: which parts of a prompt they mark, and where in its tokens these lie.

| what                                                                    | where        |
|-------------------------------------------------------------------------|--------------|
| the marked pieces of a chat request's body                              | marks.py     |
| Anthropic's documents, as text                                          | documents.py |
| where a piece begins and ends in the rendered prompt                    | fences.py    |
| the tokens of it that are the same wherever it stands                   | tokens.py    |
| the three together, for chat requests                                   | chats.py     |
| prompts as text with a separator                                        | prompts.py   |
| `/hybrid/segments`: compute ahead, list, drop                           | endpoint.py  |
"""
