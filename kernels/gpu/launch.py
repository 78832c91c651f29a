"""Small sums that every launcher does."""

from __future__ import annotations


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def warps_for(num_elements: int) -> int:
    """Warps such that a thread has about 8 elements (16 bytes of bf16, one full memory access), at most 16."""
    return min(max(num_elements // 256, 1), 16)
