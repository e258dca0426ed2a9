"""Shared by all tests: one torch thread, and property tests that a busy machine cannot fail."""

import os

import torch
from hypothesis import settings

# Small tensors lose more to hand-overs between threads than they gain.
torch.set_num_threads(1)

# A deadline would measure the machine, not the code. In CI the examples are the same on every run.
settings.register_profile("rco", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("rco")
