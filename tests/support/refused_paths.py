"""Directories and files that the caches refuse, since other users can change them: changes that make them so."""

from __future__ import annotations

import os

import pytest


def opened_to(mode):
    return lambda path: path.chmod(mode)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def link_to(target):
    def make(path):
        path.unlink()
        path.symlink_to(target or path.with_name("elsewhere"))

    return make


def given_away(path):
    if os.geteuid() != 0:
        pytest.skip("needs a user who may give files away")
    os.chown(path, 65534, 65534)


REFUSED_DIRECTORIES = {
    "group": (opened_to(0o770), "can be written by other users .*run `chmod go-w "),
    "others": (opened_to(0o707), "can be written by other users .*, or set NUMBA_GEMM_CACHE_DIR"),
    "sticky": (opened_to(0o1777), "can be written by other users"),
    "owner": (given_away, "belongs to another user .uid 65534.*set NUMBA_GEMM_CACHE_DIR"),
}
REFUSED_FILES = {
    "group": (opened_to(0o620), "can be written by other users .*run `chmod go-w "),
    "others": (opened_to(0o602), "can be written by other users"),
    "owner": (given_away, "belongs to another user"),
    "FIFO": (fifo, "is not a regular file"),
    "link": (link_to("elsewhere"), "is a symbolic link"),
    "endless": (link_to("/dev/zero"), "is a symbolic link"),
}
