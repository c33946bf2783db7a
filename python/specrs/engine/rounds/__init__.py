"""The logic of rounds: who runs, in which pages, and a round from its drafts to its commit."""
