"""The gate's grids are those of the simulation; heads of blocks have prices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gate_counted
from bench_gate import BATCHES, GRID
from gate_simulation import simulate
from specrs.assets import model_dir
from specrs.models import ModelConfig
from specrs.train.block import BlockHead
from specrs.train.heads import HeadSizes


def test_a_cell_of_each_grid_is_simulated() -> None:
    for grid in (GRID, BATCHES):
        [row] = simulate(**{name: values[-1:] for name, values in grid.items()})  # type: ignore[arg-type]
        assert (row["step"], row["tokens"]) == (grid["steps"][-1], grid["lengths"][-1]) and row["mean"] > 0.9


@pytest.mark.parametrize(("rank", "rows"), [(8, 4), (0, 5)])
def test_a_block_is_priced_by_its_multiply_adds_and_a_useless_one_costs_little(
    tmp_path: Path, rank: int, rows: int
) -> None:
    """A head with random weights, which never guesses right: a first request, whose loss is bounded."""
    config = ModelConfig.from_directory(model_dir())
    head = BlockHead(HeadSizes.of(config, 64, 64, 1), 64, 0, 4, rank)
    head.begin_at(model_dir(), config, torch.arange(64))
    head.save(config, tmp_path)
    fresh = gate_counted.Fresh(tmp_path)
    fresh.begin()
    assert fresh._default is not None
    counter, llm = fresh._default
    drafts = llm._runner.executor.drafts
    assert drafts is not None
    block = gate_counted.Block(drafts.head, llm._runner.executor.target)
    assert block.rows.at(2 * rows) > block.rows.at(rows)
    assert all(0 < cost.at(1) < counter.costs.target.at(1) / 8 for cost in (block.write, block.rows))
    plain, took, out = fresh.run("def area(width, height):\n", 64, 0.0, 0)
    assert len(out.token_ids) == 64 and 0.9 < plain / took < 1
