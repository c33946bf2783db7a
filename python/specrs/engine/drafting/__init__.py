"""The decisions of each round: which requests draft, how far, and which sources' drafts the target verifies.

The runner asks before a round runs and reports the outcome afterwards. No decision made here can change a request's
tokens: verification is exact for every tree. A bad decision costs only time, and a budget bounds that time
(``budget``).
"""
