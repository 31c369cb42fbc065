"""Files that nobody but their owner can change: the only way in which the caches read and write.

A cached kernel is machine code that runs with the user's rights, so whoever can write to a cache can run code as its
user. A directory, or a file in it, is therefore refused unless the effective user or root owns it and neither its group
nor others can write to it.

- Owner and mode are those of the open descriptor, and files are opened relative to their directory's: nothing can be
  exchanged between the check and the use.
- A symbolic link to a directory is followed, since ~/.cache is often one to another disk; the target's owner and mode
  count. A symbolic link in place of a file is refused.
- Write permission for the group is refused even where a umask of 002 gives every user a group of their own: a mode does
  not say who is in the group. (Permissions that an access control list adds show in the same bits.) Directories that
  this package makes have mode 0700.
- The sticky bit is no excuse: with it, others still add files.
- Directories above are not checked, unlike by SSH's StrictModes. Who can write to one can put another directory in the
  cache's place, but one of their own is refused, and into one of the user's own they cannot write. Project directories
  that a group shares are common above a private one.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["CacheWarning", "PrivateDirectory", "Refused", "refusal", "warn_once"]

MAX_BYTES = 16 << 20  # of a file; kernels take 10 to 50 KB


class CacheWarning(RuntimeWarning):
    """The cache of kernels and of autotune's choices cannot be used; kernels are compiled, and the model chooses."""


class Refused(PermissionError):
    """A directory or a file that others could have changed; `path` names it."""

    def __init__(self, path: Path, problem: str):
        super().__init__(problem)
        self.path = path

    def __reduce__(self) -> tuple[type[Refused], tuple[Path, str]]:
        return Refused, (self.path, str(self))


_lock = threading.Lock()
_warned: set[Path] = set()


def warn_once(path: Path, problem: str) -> None:
    """Issue a `CacheWarning`, unless there has been one about this directory or file."""
    with _lock:
        if path in _warned:
            return
        _warned.add(path)
    warnings.warn(problem, CacheWarning, stacklevel=3)


def refusal(path: Path, status: os.stat_result) -> str | None:
    """Say why a directory or a regular file is not to be trusted, and what to do; None if it can be."""
    mode, is_directory = stat.S_IMODE(status.st_mode), stat.S_ISDIR(status.st_mode)
    danger = "and cached kernels run with your rights"
    another = "set NUMBA_GEMM_CACHE_DIR to a directory that only you can write to"
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file; delete it"
    if status.st_uid not in (os.geteuid(), 0):
        fix = another if is_directory else "delete it"
        return f"{path} belongs to another user (uid {status.st_uid}), {danger}; {fix}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix = f"run `chmod go-w {shlex.quote(str(path))}`" + (f", or {another}" if is_directory else "")
        return f"{path} can be written by other users (mode {mode:04o}), {danger}; {fix}"
    return None


class PrivateDirectory:
    """An open directory that only its owner can write to; a context manager.

    Parameters
    ----------
    path : Path
        Its path.
    create : bool
        True to create it, and its parents, if it does not exist.

    Raises
    ------
    Refused
        if others could have changed what is in it.
    OSError
        if it cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check(path, self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @contextmanager
    def _open(self, name: str, flags: int) -> Iterator[int]:
        # O_NONBLOCK because opening a FIFO would wait for its other end; regular files ignore it.
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, mode=0o600, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Refused(self.path / name, f"{self.path / name} is a symbolic link; delete it") from None
            raise
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        """Return a file's contents.

        Raises
        ------
        Refused
            if others could have changed it, or it is not a regular file.
        ValueError
            if it is larger than `MAX_BYTES`.
        OSError
            if it cannot be read.
        """
        with self._open(name, os.O_RDONLY) as descriptor:
            _check(self.path / name, descriptor)
            with open(descriptor, "rb", closefd=False) as file:
                contents = file.read(MAX_BYTES + 1)
        if len(contents) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        return contents

    def touch(self, name: str, interval: float) -> None:
        """Set a file's time of modification to now if it is longer ago than `interval` seconds."""
        now = time.time()
        if now - os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mtime > interval:
            os.utime(name, (now, now), dir_fd=self._descriptor, follow_symlinks=False)

    def write(self, name: str, contents: bytes, most: int = MAX_BYTES) -> None:
        """Write a file of at most so many bytes, or replace one as a whole.

        Raises
        ------
        ValueError
            if the contents are larger.
        OSError
            if it cannot be written.
        """
        if len(contents) > most:
            raise ValueError(f"it is larger than {most:,} bytes")
        temporary = f".{secrets.token_hex(8)}.tmp"  # the kernel cache deletes it later, should this process die
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with self._open(temporary, flags) as descriptor, open(descriptor, "wb", closefd=False) as file:
                file.write(contents)
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.delete(temporary)
            raise

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a lock among processes, by a file of this name; where the file system has no locks, go without.

        The file stays: a process that waits for one that is deleted would hold a lock that nobody else sees. It is no
        lock of the directory itself because network file systems lock only what is open for writing.
        """
        import fcntl  # Windows has none, where kernels still run on the simulator

        with self._open(name, os.O_RDWR | os.O_CREAT) as descriptor:
            _check(self.path / name, descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Not left to close(): a child that another thread forks meanwhile has the descriptor, too.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _check(path: Path, descriptor: int) -> None:
    if (problem := refusal(path, os.fstat(descriptor))) is not None:
        raise Refused(path, problem)
