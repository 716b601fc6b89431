"""Tests train on the CPU, also where there are GPUs; those of `make gpu` train there, deterministically."""

import os

if os.environ.get("TESTS_ON", "cpu") == "cpu":
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
else:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
