"""What the benchmarks are made of: the contestants, their sizes, turns and tables."""
