"""Devices that run passes: the CPU (`host`) and a GPU (`cuda`), with plans of their memory."""
