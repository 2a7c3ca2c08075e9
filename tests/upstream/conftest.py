"""What `run.py` starts is no part of the project's own tests."""

collect_ignore = ["plugin.py", "probabilities.py", "rotary.py", "run.py"]
