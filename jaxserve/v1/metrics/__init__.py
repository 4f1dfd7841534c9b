"""What an engine counts, as values."""
