"""Shared by all tests: quiet TensorFlow, and where hypothesis takes its cases from."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# `make test` tries the same cases every time; `make test-all` new ones, by the option
# --hypothesis-profile=random
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("same")
