"""The systems that traindiff replaces, each run beside its replacement: `make seeds` writes benchmarks/SEEDS.md."""
