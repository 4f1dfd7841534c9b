"""What clients send and get: typed bodies, and their way to and from the engine."""
