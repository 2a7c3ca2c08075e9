"""The interfaces of other libraries: their names, signatures and meanings, run by `saccade.attention`."""

from saccade.compat.install import install

__all__ = ["install"]
