"""The metrics of other benchmarks, by their own definitions, so that their numbers and ours can stand side by side."""
