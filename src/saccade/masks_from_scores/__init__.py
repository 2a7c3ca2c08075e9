"""Masks from scores: what a score function masks by the distance of query and key becomes a window of the mask."""
