"""Devices that run passes: the CPU (`host`) and a GPU (`cuda`), and what fits into their memory."""
