"""The interfaces of other libraries: their names, signatures and meanings, run by `saccade.attention`."""
