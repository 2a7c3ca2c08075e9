"""What all of the library uses, and nothing else does: caches, arguments, errors, what the machine has."""
