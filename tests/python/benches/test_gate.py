"""The gate's grids are those of the simulation."""

from __future__ import annotations

from bench_gate import BATCHES, GRID
from gate_simulation import simulate


def test_a_cell_of_each_grid_is_simulated() -> None:
    for grid in (GRID, BATCHES):
        [row] = simulate(**{name: values[-1:] for name, values in grid.items()})  # type: ignore[arg-type]
        assert (row["step"], row["tokens"]) == (grid["steps"][-1], grid["lengths"][-1]) and row["mean"] > 0.9
