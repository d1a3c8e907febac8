"""A lock on a directory, which one program at a time writes."""

import contextlib
import errno
import os
import socket
import warnings

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_NAME = ".shardwise-lock"


class Lock:
    """A lock on a local directory, which the operating system takes back when this process ends.

    It is a lock of the process (POSIX's), hence not inherited by forked children that outlive it.
    Where another has it, the error begins with `who` and says what the other `does` there, and
    `advice`.
    """

    def __init__(self, where: str, who: str, does: str, advice: str):
        self._path = os.path.join(where, _NAME)
        self._told = who, does, advice
        self._file = None

    def take(self) -> None:
        """Take the lock, unless this process has it.

        Raises:
          RuntimeError: another process has it.
        """
        if self._held():
            return
        self.close()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        file = open(self._path, "a+")  # closing it gives the lock back
        try:
            _lock(file, self._path, *self._told)
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def close(self) -> None:
        """Give the lock back, which lets others in."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _held(self):
        """Whether this process has locked the file that now has the lock's name."""
        if self._file is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        return False


def _lock(file, path, who, does, advice):
    try:
        if fcntl is None:
            raise OSError(errno.ENOLCK, "no POSIX locks")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            warnings.warn(
                f"{who}: {os.path.dirname(path)} cannot be locked ({error}); make sure that no "
                f"other program writes there.",
                stacklevel=2,
            )
            return
        file.seek(0)
        raise RuntimeError(
            f"{who}: another program ({file.read() or 'unknown'}) {does} "
            f"{os.path.dirname(path)}. {advice}."
        ) from None
