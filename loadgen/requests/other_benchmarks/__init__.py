"""The metrics of other benchmarks, by their own definitions. So their numbers and ours can stand side by side."""
