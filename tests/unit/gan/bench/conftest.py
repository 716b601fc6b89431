"""Benchmarks, which need Linux."""

from gan.files.system import WINDOWS

collect_ignore_glob = ["*"] if WINDOWS else []
