"""What tests, benchmarks, tuning and the command line share: named problems, and the one tolerance policy."""

from saccade.testing.accuracy import Report, check
from saccade.testing.cases import Case, Inputs

__all__ = ["Case", "Inputs", "Report", "check"]
