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
| computing segments before a prompt needs them                           | warming.py   |
| questions to the scheduler                                              | questions.py |
| sharing the cold segments of a prompt out to several servers            | parallel.py  |
| an abort that comes meanwhile                                           | aborts.py    |
| what is asked of another server, and what it sends                      | peers.py     |
| memory through which entries go to the scheduler and from it            | files.py     |
| what this server tells and sends others                                 | handing.py   |
| what an HTTP process knows of its own server                            | local.py     |
"""
