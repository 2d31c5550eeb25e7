"""Collectives: all-reduces that stand in for `lax.psum`, and what they need."""

from jdp.collectives.shared_memory import (
    SharedBuffer,
    create_shared_buffer,
    shared_memory_all_reduce,
)

__all__ = ["SharedBuffer", "create_shared_buffer", "shared_memory_all_reduce"]
