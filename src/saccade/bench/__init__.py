"""The measuring bench: saccade and its peers, checked against the oracle and timed in turns, as rows of JSON.

A Grid is a list of Cells; a Cell is a Case in a mode. For each Cell `run` asks every provider for a callable, measures
its result against the yardstick, times those that pass and the machine's two ceilings sample by sample, and yields one
Row per provider. `report` makes tables and plots from committed rows.
"""
