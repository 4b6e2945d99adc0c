"""Pipeline schedules: pure functions that write, for all ranks, the passes of a step in order."""
