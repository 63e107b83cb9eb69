"""What a server says of itself where a router looks at it: headers of the pages that a router reads."""

ALIVE = "/v1/models"
"""Answered by the HTTP process alone. `/health` computes a token and waits behind a long prefill, which is no fault; a
scheduler that dies takes the HTTP process with it, one that hangs is ended by SGLang's watchdog."""

INFO = "/server_info"

SERVER = "X-Hybrid-Server"
"""One start of one server: behind one address another value is another server, which holds other things."""

ENDING = "X-Hybrid-Ending"
"""The server was told to stop. It answers what it has, and ends when there is a moment without requests."""
