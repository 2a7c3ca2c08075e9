"""Random calls of the whole API, on a CPU or a GPU, against the oracle in float64.

`python -m tests.random_calls --device cuda --seconds 400 --seed N --processes P`, from the repository's root. A call is
a program of a few lines, drawn from the seed and the call's number; what runs is that text, and what fails is printed
as that text. `--modes` runs the same calls compiled, captured, exported and so on. See `python -m tests.random_calls
--help`.
"""
