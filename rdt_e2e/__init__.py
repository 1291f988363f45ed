"""End-to-end weight sync from a sharded trainer into a vLLM fleet, over Ray Direct Transport and NIXL."""

__version__ = "0.1.0"
