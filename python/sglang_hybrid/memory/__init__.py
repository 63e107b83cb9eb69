"""Elastic memory as pure accounting: one byte budget of granules shared by KV and recurrent states."""
