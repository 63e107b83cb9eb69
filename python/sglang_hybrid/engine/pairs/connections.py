"""Servers that prefill as one that decodes knows them: one that was started again is met anew.

SGLang keeps the ports of their schedulers until it looks in vain twice in a row, five seconds apart. Of a server that
is back by then it keeps the old ones: nobody listens there, and the next request waits for its time-out.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

GONE = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
"""What libzmq tells of a connection whose other end has closed it, or is not there."""

_names = count()


class Connections:
    """From the scheduler of a server that decodes to those that prefill; only `gone` is shared with threads."""

    def __init__(self) -> None:
        self.watched: set[Any] = set()
        self.gone: set[str] = set()

    def watch(self, address: str, socket: Any, lock: Any) -> None:
        """Note when the other end of `socket`, a scheduler of the server at `address`, goes away."""
        if socket in self.watched:
            return
        with lock:
            if socket.closed:
                return
            # The name that pyzmq gives by itself is that of a descriptor, which a later socket may have too.
            monitor = socket.get_monitor_socket(GONE | zmq.Event.MONITOR_STOPPED, f"inproc://prefills-{next(_names)}")
        self.watched = {each for each in self.watched if not each.closed} | {socket}
        threading.Thread(target=self._listen, args=(monitor, address), name=f"prefills {address}", daemon=True).start()

    def _listen(self, monitor: Any, address: str) -> None:
        with monitor:
            while recv_monitor_message(monitor)["event"] & GONE:
                self.gone.add(address)


def of(manager: Any) -> Connections:
    found: Connections = manager.__dict__.setdefault("sglang_hybrid_connections", Connections())
    return found


def watch(_: None, receiver: Any) -> None:
    """After SGLang found the schedulers that prefill a request."""
    for scheduler in receiver.bootstrap_infos or ():
        of(receiver.kv_mgr).watch(receiver.bootstrap_addr, *receiver._connect_to_bootstrap_server(scheduler))


def forget_gone(manager: Any) -> None:
    """What SGLang knows of servers that closed a connection is asked again with the next request.

    If a server was there all the time, that is all that happens. The scheduler calls it, as it uses the sockets.
    """
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.utils.network import NetworkAddress

    gone = of(manager).gone
    while gone:
        address = gone.pop()
        with manager.connection_lock:
            keys = [key for key in manager.connection_pool if key.startswith(f"{address}_")]
            schedulers = [each for key in keys for each in manager.connection_pool.pop(key)]
            manager.prefill_info_table.pop(address, None)
        for each in schedulers:
            CommonKVReceiver.disconnect_endpoint(NetworkAddress(each["rank_ip"], int(each["rank_port"])).to_tcp())
