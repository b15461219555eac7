"""Checkpoints: those that come with the library, and the strict reading of folders."""
