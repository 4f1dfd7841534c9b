"""The cases of benchmarks/kernels.py, a module for each kind of kernel."""
