"""GPU kernels in Pallas and their plain meaning: arrays in, arrays out."""
