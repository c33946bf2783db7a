"""Whether and how far to draft, and whose drafts to verify.

A round asks before it runs and tells what came of it. Nothing decided here can change a request's tokens: verification
is exact for every tree, so a bad choice costs time only, and how much time is bounded by a budget (``budget``).
"""
