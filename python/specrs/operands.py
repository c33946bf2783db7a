"""Tensors that belong together in a launch on a GPU, by name.

`specrs._specrs` reads each by the name of its attribute, so that an object of any class with these attributes will do.
Arguments are passed by keyword: two tensors of one type cannot be swapped unseen. B requests of V nodes a tree and K
branches; int32 where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TreeArrays:
    """Trees that are verified.

    Attributes:
        tokens, parents: token and parent of every node, one tree behind the other; -1 is the root's parent.
        offsets: [B + 1], the first node of each tree, and the end of the last.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AcceptArrays:
    """Results of verification.

    Attributes:
        offsets: [B + 1], the first entry of each request's path, and the end of the last.
        paths, tokens, rows: for every entry, its node in the tree, the token that is drawn there, and its row of the
            logits.
        roots: [B], the token that the next tree begins with.
        new_lens: [B], committed lengths with the path.
        faults: [B], not 0 where the scores were no numbers.
    """

    offsets: torch.Tensor
    paths: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    roots: torch.Tensor
    new_lens: torch.Tensor
    faults: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerArrays:
    """Parameters by which tokens are drawn, as `_device_samplers` writes them.

    Attributes:
        rows: int64 [B, 6], sampling parameters.
        edit_begins, edit_counts: [B], each request's part of the edits.
        edit_tokens, edit_biases, edit_outputs: for each edit, its token, the number that is added to the token's logit
            (float32), and how often the token is in the output.
    """

    rows: torch.Tensor
    edit_begins: torch.Tensor
    edit_counts: torch.Tensor
    edit_tokens: torch.Tensor
    edit_biases: torch.Tensor
    edit_outputs: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BeamArrays:
    """A round's drafts while they grow.

    Attributes:
        scores, candidate_tokens, candidate_parents: [B, candidates] of all steps, the scores float32.
        beams: [B, K], the candidates that the last step kept.
        tokens, parents: [B * K], their tokens and the branches that they continue.
        ancestors: int64 [B * K, words], the bits of the draft slots that each attends.
        sound: [B], steps whose scores gave a distribution.
    """

    scores: torch.Tensor
    candidate_tokens: torch.Tensor
    candidate_parents: torch.Tensor
    beams: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    sound: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredTrees:
    """Trees that are united with others.

    Attributes:
        offsets: [B + 1], the first node of each tree, and the end of the last.
        tokens, parents: [B * V].
        scores: float32 [B * V].
    """

    offsets: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ListArrays:
    """The likeliest tokens of each level of a batch's blocks, best first.

    Attributes:
        scores: float32 [B * D * width], log-probabilities.
        ids: [B * D * width], the tokens in the draft's vocabulary.
        sound: [B * D], 0 of a list without a distribution.
    """

    scores: torch.Tensor
    ids: torch.Tensor
    sound: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockArrays:
    """The rows of a batch's blocks, and the limits of their trees, as the device writes them.

    Attributes:
        offsets: [B + 1], the first row of each block, and the end of the last.
        tokens: [B * rows].
        masks: int64 [B * rows], the rows of a row's block as bits.
        wanted: [B * D], the row that predicts each level.
        heats: float32 [B * D], the factor of each level's scores.
        levels, nodes: [B], the most levels and nodes of each tree.
    """

    offsets: torch.Tensor
    tokens: torch.Tensor
    masks: torch.Tensor
    wanted: torch.Tensor
    heats: torch.Tensor
    levels: torch.Tensor
    nodes: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuiltTrees:
    """Trees that a kernel makes.

    Attributes:
        offsets: [B + 1], the first node of each tree, and the end of the last.
        tokens, depths, parents: [B * V].
        next_child, next_sibling: [B * V], -1 where there is none.
        scores: float32 [B * V].
    """

    offsets: torch.Tensor
    tokens: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    next_child: torch.Tensor
    next_sibling: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanArrays:
    """A plan that the device writes: `Plan` has the same names.

    Attributes:
        rows, prefix_lens: [B].
        versions: int64 [B].
        qo_indptr: [B + 1].
        positions, out_slots: [Q].
        mask: int64 [Q, words], without elements where the phase has none.
    """

    rows: torch.Tensor
    versions: torch.Tensor
    qo_indptr: torch.Tensor
    prefix_lens: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MoveArrays:
    """Copies of KV rows that the device lists.

    Attributes:
        src, dst: slots.
        offsets: [B + 1], the first copy of each request, and the end of the last.
    """

    src: torch.Tensor
    dst: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundFound:
    """Results of a round, by which its end decides.

    Attributes:
        offsets, tokens, new_lens, roots, faults: the fields of `AcceptArrays`.
        sound: the field of `BeamArrays`.
        live: live seats; the last element counts them.
    """

    offsets: torch.Tensor
    tokens: torch.Tensor
    new_lens: torch.Tensor
    roots: torch.Tensor
    faults: torch.Tensor
    sound: torch.Tensor
    live: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SeatLimits:
    """Limits of seats.

    Attributes:
        limits: [B], the committed length at which a seat has ended.
        caps: [B], the deepest level that is wanted.
        stops: [B * places], tokens that end a seat.
        stop_counts: [B], how many of its places are used.
    """

    limits: torch.Tensor
    caps: torch.Tensor
    stops: torch.Tensor
    stop_counts: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SeatState:
    """State of seats, which the end of a round changes.

    Attributes:
        lens: [B], committed lengths.
        roots: [B], the token that the next tree begins with.
        depths: [B], how deep the seat drafts.
        done: [B], 1 once the seat has ended.
    """

    lens: torch.Tensor
    roots: torch.Tensor
    depths: torch.Tensor
    done: torch.Tensor
