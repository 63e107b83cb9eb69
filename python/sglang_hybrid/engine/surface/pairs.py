"""What is hooked and used of SGLang for prefill/decode pairs."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import IMPORT, PRIVATE, SCHEDULER, Hook, Use

_PAIRS = "srt.disaggregation."
_RECEIVER = _PAIRS + "common.conn:CommonKVReceiver"
_HANDED_OVER = _PAIRS + "decode:DecodeTransferQueue._commit_transfer_to_req"

PAIRS: tuple[Hook, ...] = (
    Hook(_PAIRS + "utils:MetadataBuffers.set_buf", "AFTER", "pairs.misses:send", SCHEDULER),
    Hook(_HANDED_OVER, "AFTER", "pairs.misses:take", SCHEDULER),
    Hook(_HANDED_OVER, "AFTER", "pairs.kv_cache:uncounted", SCHEDULER),
    Hook(_PAIRS + "prefill:PrefillBootstrapQueue.add", "AROUND", "pairs.guards:admit", SCHEDULER),
    Hook(_PAIRS + "decode:DecodePreallocQueue.add", "AROUND", "pairs.guards:admit", SCHEDULER),
    Hook(
        _PAIRS + "common.conn:CommonKVManager.try_ensure_parallel_info",
        "AROUND",
        "pairs.guards:meet",
        SCHEDULER,
    ),
    Hook(_RECEIVER + "._setup_bootstrap_infos", "AFTER", "pairs.connections:watch", SCHEDULER),
    *(
        Hook(
            _PAIRS + f"mooncake.conn:MooncakeKVManager.{name}",
            "AROUND",
            "pairs.guards:survive",
            SCHEDULER,
            "mooncake",
        )
        for name in ("send_kvcache", "maybe_send_extra", "send_aux")
    ),
    Hook(
        _PAIRS + "prefill:SchedulerDisaggregationPrefillMixin._send_kv_chunk",
        "BEFORE",
        "pairs.indices:at_hand",
        SCHEDULER,
        "cpu",
        since="0.5.22",
    ),
    Hook(
        _PAIRS + "checksum:KvChecksumComputer.compute",
        "REPLACE",
        "pairs.checksums:compute",
        SCHEDULER,
        "cpu",
        since="0.5.21",
    ),
    *(
        Hook(f"nixl._api:nixl_agent.{name}", "BEFORE", "pairs.nixl:host_memory", SCHEDULER, "nixl")
        for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist")
    ),
)

PAIR_USES: tuple[Use, ...] = (
    Use("srt.mem_cache.registry:create_unified_radix_cache", IMPORT, "pairs.kv_cache", SCHEDULER, since="0.5.21"),
    Use(_PAIRS + "utils:FAKE_BOOTSTRAP_HOST", IMPORT, "pairs.guards", SCHEDULER),
    Use(_PAIRS + "utils:prepare_abort", IMPORT, "pairs.guards", SCHEDULER),
    Use(_RECEIVER, IMPORT, "pairs.connections", SCHEDULER),
    Use(_RECEIVER + "._connect_to_bootstrap_server", PRIVATE, "pairs.connections", SCHEDULER),
    Use("srt.utils.network:NetworkAddress", IMPORT, "pairs.connections", SCHEDULER),
    Use(
        _PAIRS + "mooncake.conn:MooncakeKVManager._staging_outstanding",
        PRIVATE,
        "pairs.guards",
        SCHEDULER,
        when="mooncake",
        since="0.5.21",
    ),
    *(
        Use(
            _PAIRS + f"checksum:KvChecksumComputer.{name}",
            PRIVATE,
            "pairs.checksums",
            SCHEDULER,
            when="cpu",
            since="0.5.21",
        )
        for name in ("_kv_data_ptrs", "_kv_item_lens", "_state_data_ptrs", "_state_item_lens")
    ),
)
