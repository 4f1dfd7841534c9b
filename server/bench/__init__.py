"""Workloads of the offline benchmark, and how they are timed."""
