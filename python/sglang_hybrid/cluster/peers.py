"""Which servers prefill and which decode, and whether they can work together (docs/pd.md)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from urllib.parse import urlsplit

from sglang_hybrid.cluster.worker import Worker, checked
from sglang_hybrid.core.errors import ConfigError

PREFILL, DECODE = "prefill", "decode"

ALIKE = {
    "version": "SGLang",
    "sglang_hybrid": "sglang-hybrid",
    "page_size": "--page-size",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "mamba_ssm_dtype": "--mamba-ssm-dtype",
    "mamba_conv_dtype": "SGLANG_MAMBA_CONV_DTYPE",
    "mamba_radix_cache_strategy": "--mamba-radix-cache-strategy",
    "disaggregation_transfer_backend": "--disaggregation-transfer-backend",
    "disaggregation_enable_kv_checksum": "--disaggregation-enable-kv-checksum",
    "quantization": "--quantization",
    "speculative_algorithm": "--speculative-algorithm",
    "tp_size": "--tp-size",
    "pp_size": "--pp-size",
}
"""What all servers of pairs have alike, by its name in `/server_info`, and what sets it. KV and states travel as bytes:
SGLang compares page size and type of KV at the first transfer, the size of a state in the middle of it, the rest never.
States split over ranks in another way on the other side have not been run."""

_ROOM = ("max_total_num_tokens", "num_reserved_decode_tokens")


@dataclasses.dataclass
class Peers:
    """The servers of a router of pairs. `urls` are all of them, `ports` the bootstrap ports of those that prefill.

    A port that is None is the one that the server itself names. Each `meet` of a server keeps what it has to agree on.
    """

    urls: list[str]
    ports: dict[str, int | None]
    _facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def named(cls, prefill: list[str], decode: list[str]) -> Peers:
        """From `URL[,BOOTSTRAP_PORT]` of servers that prefill and `URL` of servers that decode; raises ConfigError."""
        for flag, given in (("--prefill", prefill), ("--decode", decode)):
            if not given:
                raise ConfigError(f"pairs need a server of either kind; name one with {flag} URL: none is named")
        split = [url.partition(",") for url in prefill]
        for (_, comma, port), whole in zip(split, prefill, strict=True):
            if comma and not (port.isdecimal() and 0 < int(port) < 65536):
                raise ConfigError(f"a bootstrap port is from 1 to 65535, as in http://10.0.0.1:30000,8998: {whole}")
        urls = checked([*(url for url, _, _ in split), *decode])
        ports = {url: int(port) if port else None for url, (_, _, port) in zip(urls, split, strict=False)}
        return cls(urls, ports)

    def role(self, url: str) -> str:
        """`prefill` or `decode`."""
        return PREFILL if url in self.ports else DECODE

    def bootstrap(self, url: str) -> tuple[str, int]:
        """Host and port where a server that decodes asks for the one at `url` that prefills; once it was met."""
        host = urlsplit(url).hostname or ""
        port = self.ports[url] or self._facts[url]["disaggregation_bootstrap_port"]
        return (f"[{host}]" if ":" in host else host), int(port)

    def most_tokens(self, url: str) -> float:
        """The longest prompt for which the server at `url`, that decodes, finds room beside what it keeps for answers.

        SGLang holds a longer one until it times out, and all that come later behind it.
        """
        facts = self._facts.get(url, {})
        there, kept = facts.get(_ROOM[0]), facts.get(_ROOM[1])
        if not there or kept is None:
            return math.inf
        page = int(facts.get("page_size") or 1)
        return (int(there) - int(kept)) // page * page

    def meet(self, worker: Worker, info: dict[str, Any], healthy: list[Worker]) -> None:
        """Raise ValueError if the server that says `info` of itself cannot work with those that are `healthy`."""
        role, told = self.role(worker.url), info.get("disaggregation_mode")
        if told != role:
            raise ValueError(f"it is no {role} server; start it with --disaggregation-mode {role}: {told}")
        if role == PREFILL and not (self.ports[worker.url] or info.get("disaggregation_bootstrap_port")):
            raise ValueError(f"it names no bootstrap port; name it: --prefill {worker.url},PORT")
        for other in healthy:
            facts = self._facts[other.url]
            for name, setting in ALIKE.items():
                if name in info and name in facts and info[name] != facts[name]:
                    raise ValueError(
                        f"it does not fit {other}: its {setting} is {info[name]}, not {facts[name]}; KV and states "
                        "are handed over as bytes"
                    )
        kept = (*ALIKE, *_ROOM, "disaggregation_bootstrap_port")
        self._facts[worker.url] = {name: info[name] for name in kept if name in info}
