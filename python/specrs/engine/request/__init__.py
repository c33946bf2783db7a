"""One request: its tokens and state, the samplers of its tokens, and its output."""
