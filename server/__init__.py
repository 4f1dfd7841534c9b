"""HTTP and the command line over the engine: knows no array."""
