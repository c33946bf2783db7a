"""The logic of rounds: choosing requests, leasing pages, and running a round from its drafts to its commit."""
