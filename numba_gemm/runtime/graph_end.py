"""The end of a CUDA graph: when it, all graphs that contain it, and all executable ones made from them are gone."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from cuda.bindings import driver

from .driver import call, failure

SEMAPHORE_BYTES = 64  # at least the size of a sem_t
UNSYNCHRONISED = int(driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
MOVE = int(driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)


@cache
def _library() -> Any:
    """Return the functions of POSIX semaphores; None where there are none."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    for name in ("free", "sem_destroy", "sem_post", "sem_trywait"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    return library


class GraphEnd:
    """Tells when the graph that is being captured from a stream is gone.

    The graph owns a reference to an object whose destructor is ``sem_post``: the driver calls it on a thread of its
    own, on which neither Python nor CUDA may be called. The semaphore is never freed before that, not even when Python
    ends.
    """

    def __init__(self, stream: int) -> None:
        library = _library()
        self._semaphore: int | None = None
        if library is None:
            return
        self._semaphore = int(library.malloc(SEMAPHORE_BYTES))
        library.sem_init(self._semaphore, 0, 0)
        post = ctypes.cast(library.sem_post, ctypes.c_void_p).value
        status, _, _, graph, *_ = driver.cuStreamGetCaptureInfo(stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise failure("cuStreamGetCaptureInfo", status)
        owned = call(driver.cuUserObjectCreate, self._semaphore, post, 1, UNSYNCHRONISED)
        call(driver.cuGraphRetainUserObject, graph, owned, 1, MOVE)

    def has_come(self) -> bool:
        """Return True if it has come; to be asked until then."""
        if self._semaphore is None or _library().sem_trywait(self._semaphore):
            return False
        _library().sem_destroy(self._semaphore)
        _library().free(self._semaphore)
        self._semaphore = None
        return True
