"""One model family a file: its wiring and the names of its weights."""
