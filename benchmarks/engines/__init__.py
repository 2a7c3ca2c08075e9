"""Whole engines with saccade's attention beside their own: released packages, models of random weights."""
