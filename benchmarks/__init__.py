"""What is fast, measured: docs/bench.md says how to run these and how to read the figures."""
