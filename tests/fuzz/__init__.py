"""A fuzzer over the public calls: every case is right against an oracle of its own, or a clear error."""
