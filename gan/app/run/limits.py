"""What a shell allows a process: enough open files for a rank, and what to type where it allows too little."""

import errno

from gan.files.errors import UserError
from gan.files.system import resource

# Without file handles a rank may wait for ever: a loader's worker sends each tensor by a handle, and multiprocessing
# waits without a limit for the one that cannot be sent. So too few are refused before the first process is started.

FILES = 256  # open files of a rank: its libraries, logs, checkpoint, connections to a few others
OF_A_WORKER = 64  # more for each worker of the loaders: pipes, and the tensors of the batches that it has prepared
NO_MORE = ("can't start new thread", "Resource temporarily unavailable")  # Python's words, and those of C
OF_A_RANK = 16  # more for each rank of the run: connections of each process group


def allow_files(workers: int, ranks: int) -> None:
    """Let this process, and those that it starts, open the files that a rank needs. Refuse if the shell forbids it."""
    if resource is None:  # Windows has no such limit
        return
    least = FILES + OF_A_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = least + OF_A_RANK * ranks
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    soft = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < least:
        raise UserError(
            f"too many open files: this shell allows a process {soft}, and a rank with {workers} workers needs "
            f"{least}; type ulimit -n {max(4096, least)}"
        )


def named(error: BaseException | None) -> UserError | None:
    """The error of a user whose shell allows too little, if that is what this error, or its cause, says."""
    if error is None or isinstance(error, UserError):
        return None
    number, text = getattr(error, "errno", None), str(error)
    if resource and (number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        more = max(4096, 4 * allowed)
        return UserError(f"too many open files: this shell allows a process {allowed}; type ulimit -n {more}")
    if any(words in text for words in NO_MORE):
        return UserError(
            f"no more processes or threads can be started ({text}); type ulimit -u unlimited, or fewer --devices or "
            f"--workers"
        )
    return named(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
