"""A debugger whose commands are given beforehand."""

from __future__ import annotations

import io
import pdb
import sys


def scripted(*commands):
    """A hook that has pdb read commands; and what it says."""
    said = io.StringIO()

    def hook():
        typed = io.StringIO("".join(f"{command}\n" for command in commands))
        # Its frame is the caller's, as pdb.set_trace's is.
        pdb.Pdb(stdin=typed, stdout=said, nosigint=True, readrc=False).set_trace(sys._getframe().f_back)

    return hook, said
