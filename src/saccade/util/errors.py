"""The errors of this package that torch and Python lack."""

from __future__ import annotations


class Unsupported(NotImplementedError):
    """No backend, or not the one that was named, runs this call; the message holds one line of reason for each."""

    __module__ = "saccade"  # as users import it
