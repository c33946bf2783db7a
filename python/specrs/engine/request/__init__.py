"""One request: its tokens and state, what its tokens are drawn by, and what comes out of it."""
