"""Measures jupyter_ddp beside what users would pick instead, in one run: ``python -m benchmarks --help``."""
