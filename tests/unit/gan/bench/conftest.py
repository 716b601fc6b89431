"""Benchmarks, which need Linux."""

from gan.system import WINDOWS

collect_ignore_glob = ["*"] if WINDOWS else []
