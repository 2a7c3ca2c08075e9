"""What several tests share, or tests and benchmarks, and users do not need."""
