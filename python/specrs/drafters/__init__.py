"""Sources of drafts that need no head: the protocol, and the sources of the package.

`SuffixDrafter` follows a request's own text, `RecyclingDrafter` what the target ranked highest after each token,
`CorpusDrafter` texts that the operator gives. A class of your own is a `Drafter` by having its two attributes and one
method. All sources of an engine go into one tree (`specrs._specrs.merge_drafts`); none can change an output.
"""

from __future__ import annotations

from specrs.drafters.corpus import CorpusDrafter
from specrs.drafters.protocol import Drafter, Drafting, DraftRequest, Drafts, Holding, Observing, Proposal
from specrs.drafters.recycling import RecyclingDrafter
from specrs.drafters.suffix import SuffixDrafter

__all__ = [
    "CorpusDrafter",
    "DraftRequest",
    "Drafter",
    "Drafting",
    "Drafts",
    "Holding",
    "Observing",
    "Proposal",
    "RecyclingDrafter",
    "SuffixDrafter",
]
