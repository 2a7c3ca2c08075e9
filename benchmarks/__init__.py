"""Measurements of saccade beside its peers, from the root of a clone: `saccade bench`, `python -m benchmarks.host` …"""
