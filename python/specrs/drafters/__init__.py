"""Sources of drafts that need no head: the protocol, and those of the package."""

from __future__ import annotations

from specrs.drafters.protocol import Drafter, Drafting, DraftRequest, Observing, Proposal

__all__ = ["Drafter", "DraftRequest", "Drafting", "Observing", "Proposal"]
