"""Training the pocket model: drawn clips, codec, transformer, evaluation and export."""
