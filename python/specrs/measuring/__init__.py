"""Measurements of rounds and kernels on the machine at hand, for ``specrs bench`` and ``benches/gpu``.

`shapes` has models of random weights, `rounds` times an engine's steady rounds, `floors` says how long memory takes for
what a round reads, `kernels` where a GPU's time goes. `cases` measures plain and tree rounds of a model side by side,
`report` makes texts of the results, `machine` says whose they are.
"""
