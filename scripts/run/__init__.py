"""How a command runs: its flags, its ranks and signals, the pipeline it loads, the files it writes."""
