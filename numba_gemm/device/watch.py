"""Arrays that report each access in the simulator; tracing is built on them.

A `Watched` array reports each element that is read or written to its recorder, and passes the recorder on to its views.
The twins of vector accesses and copies use `read_run`, `write_run` and `Copy`, so that one instruction of the hardware
counts as one access of several bytes. On other arrays these do the same without reports.

A recorder has three methods. ``access(array, address, size, kind)`` returns a handle. ``paired(read, write)`` gets the
handles of the two accesses of an asynchronous copy. ``landed(write)`` is called when the copy is known to be in shared
memory.
"""

from __future__ import annotations

from ..simulator.switch import SIMULATOR

READ, WRITE, COPY_READ, COPY_WRITE = range(4)

if SIMULATOR:
    import weakref

    import numpy as np

    class Watched(np.ndarray):
        """Array with a `recorder`, None until it has one, and the name that the recorder uses for the array."""

        recorder = None
        name = None
        start = None  # address, once it is known

        def __array_finalize__(self, parent):
            if isinstance(parent, Watched):
                self.recorder, self.name = parent.recorder, parent.name

        def __getitem__(self, index):
            value = super().__getitem__(index)
            if self.recorder is not None and not isinstance(value, np.ndarray):
                self.recorder.access(self, place_of(self, index), self.itemsize, READ)
            return value

        def __setitem__(self, index, value):
            super().__setitem__(index, value)
            if self.recorder is None:
                return
            target = super().__getitem__(index)
            if not isinstance(target, np.ndarray):
                self.recorder.access(self, place_of(self, index), self.itemsize, WRITE)
                return
            source = None
            if isinstance(value, Watched) and value.recorder is not None:
                source = watched(np.broadcast_to(unwatched(value), target.shape), value.recorder, value.name)
            for place in np.ndindex(target.shape):  # a slice: one access per element, also of what is assigned
                if source is not None:
                    self.recorder.access(source, place_of(source, place), source.itemsize, READ)
                self.recorder.access(target, place_of(target, place), self.itemsize, WRITE)

        # NumPy's C code would read the elements without a report.
        def __array_ufunc__(self, function, method, *inputs, **options):
            raise _whole(function.__name__)

        def __array_function__(self, function, types, args, options):
            if function not in _WITHOUT_ACCESS:
                raise _whole(function.__name__)
            return super().__array_function__(function, types, args, options)

        @property
        def flat(self):
            """Elements in row-major order."""
            return _Flat(self)

    _WITHOUT_ACCESS = {np.may_share_memory, np.ndim, np.reshape, np.shape, np.shares_memory, np.size, np.transpose}

    def _whole(name):
        return TypeError(f"{name} of a whole array or slice is not traced: write a loop over its elements")

    def _refused(name):
        def refuse(self, *args, **options):
            raise _whole(name)

        return refuse

    # Methods that bypass both protocols. Accesses to the elements of a copy are refused by the recorder.
    for _name in ("argmax", "argmin", "argsort", "dot", "fill", "item", "nonzero", "put", "sort", "tolist"):
        setattr(Watched, _name, _refused(_name))

    class _Flat:
        """Value of `Watched.flat`."""

        def __init__(self, array):
            self._array = array

        def __len__(self):
            return self._array.size

        def __getitem__(self, index):
            return self._array[np.unravel_index(index, self._array.shape)]

        def __setitem__(self, index, value):
            self._array[np.unravel_index(index, self._array.shape)] = value

        def __iter__(self):
            return (self[i] for i in range(len(self)))

    def watched(array, recorder, name):
        """Return a watched view of an array."""
        made = array.view(Watched)
        made.recorder, made.name = recorder, name
        return made

    def like(array, other):
        """Return an array that is watched as `other` is, or unchanged if `other` is not."""
        return watched(array, other.recorder, other.name) if isinstance(other, Watched) else array

    _addresses: dict = {}  # by the id of an array; the array may be gone

    def address(array):
        """Address of an array's first element."""
        known = _addresses.get(id(array))
        if known is None or known[0]() is not array:
            if len(_addresses) >= 256:
                _addresses.clear()
            # NumPy takes longer for this than for everything else in an access.
            known = _addresses[id(array)] = (weakref.ref(array), array.__array_interface__["data"][0])
        return known[1]

    def place_of(array, index):
        """Address of an element of a watched array; negative indices count from the end."""
        index = index if isinstance(index, tuple) else (index,)
        if (place := array.start) is None:
            place = array.start = address(array)
        for i, extent, step in zip(index, array.shape, array.strides, strict=True):
            place += (int(i) + extent if i < 0 else int(i)) * step
        return place

    def unwatched(array):
        """Return a view of an array whose accesses are not reported."""
        return array.view(np.ndarray) if isinstance(array, Watched) else array

    def _see(array, places, kind):
        if isinstance(array, Watched) and array.recorder is not None and places:
            return array.recorder.access(array, place_of(array, places[0]), len(places) * array.itemsize, kind)
        return None

    def read_run(array, places):
        """Read neighbouring elements in one access."""
        _see(array, places, READ)
        plain = unwatched(array)
        return tuple([plain[place] for place in places])

    def write_run(array, places, values):
        """Write neighbouring elements in one access."""
        _see(array, places, WRITE)
        plain = unwatched(array)
        for place, value in zip(places, values, strict=True):
            plain[place] = value

    class Copy:
        """Asynchronous copy of neighbouring elements, with zeros where sources are missing, from its start on.

        Until it lands, the target holds NaN, since the bytes may change at any time.
        """

        __slots__ = ("_seen", "_source", "_sources", "_target", "_targets")

        def __init__(self, target, targets, source, sources):
            read, seen = _see(source, sources, COPY_READ), _see(target, targets, COPY_WRITE)
            if read is not None and seen is not None:
                target.recorder.paired(read, seen)
            self._seen = None if seen is None else (target.recorder, seen)
            self._target, self._targets = unwatched(target), targets
            self._source, self._sources = unwatched(source), sources
            for place in targets:
                self._target[place] = np.float32(np.nan)

        def land(self):
            """Write the source's current values to the target."""
            for i, place in enumerate(self._targets):
                self._target[place] = self._source[self._sources[i]] if i < len(self._sources) else np.float32(0)
            if self._seen is not None:
                recorder, access = self._seen
                recorder.landed(access)
