"""The engine under event loops: in a thread, or in a process of its own."""
