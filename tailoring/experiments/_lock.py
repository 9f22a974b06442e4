"""One process at a time writes into a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

NAME = ".lock"


class Lock:
    """Holds a folder as long as it lives; the system gives the folder free when the process ends, however it ends."""

    def __init__(self, file: IO[str]):
        self.file = file

    def __del__(self) -> None:
        self.file.close()


_mine: WeakValueDictionary[tuple[int, int], Lock] = WeakValueDictionary()  # of this process, by device and inode of their files


def lock_folder(folder: Path) -> Lock:
    """Refuse a folder that another process holds. Within a process it may be held many times: all share one lock."""
    path = folder / NAME
    file = path.open("a+")  # programs that this one starts do not inherit it (PEP 446)
    status = os.fstat(file.fileno())
    key = status.st_dev, status.st_ino
    if (known := _mine.get(key)) is not None:
        file.close()  # which frees nothing: a flock belongs to one opening of the file
        return known
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read().strip()
        file.close()
        raise OSError(
            f"another process{f' ({who})' if who else ''} is writing into {folder}: wait for its end, or choose another folder with --out "
            "(nothing was changed)"
        ) from None
    except OSError as error:  # some file systems of clusters have no locks
        print(f"{path} cannot be locked ({error.strerror}): see to it that only one process writes there", file=sys.stderr)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _mine[key] = lock = Lock(file)
    return lock


def _forget() -> None:
    """A forked child is another process, and must not keep the folder after its parent was killed."""
    for lock in list(_mine.values()):
        lock.file.close()
    _mine.clear()


os.register_at_fork(after_in_child=_forget)
