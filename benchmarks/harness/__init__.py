"""The benchmark: saccade and its peers, checked against the oracle, timed in turns, and written as JSON rows.

A BenchGrid is a list of Cells; a Cell is a Case in a mode. For each Cell `run` asks every provider for a callable,
checks its result against the oracle, times those that pass and the machine's two ceilings in turns, and yields one
BenchRow per provider. `report` makes tables and plots from committed rows.
"""
