"""The forward: its kernel, its launches and its schedules."""
