"""The step on the device: batches, programs, state and sampling."""
