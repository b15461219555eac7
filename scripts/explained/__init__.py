"""The parts of `explain`: attention paths, schedule and offload, each with its table."""
