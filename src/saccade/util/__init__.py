"""Helpers of the whole library: caches, arguments, errors, hardware."""
