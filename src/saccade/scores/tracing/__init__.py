"""What a score function computes, found out by running it once: a tape of its operations, and a graph of them."""
