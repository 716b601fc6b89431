"""Several ranks, which Windows does not have."""

from gan.files.system import WINDOWS

collect_ignore_glob = ["*"] if WINDOWS else []
