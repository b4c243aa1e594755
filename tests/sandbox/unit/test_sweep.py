"""Whose processes a sweep may end."""

import os
import subprocess

import pytest

from refusion_eval.sandbox.jail import unprivileged_ids
from refusion_eval.sandbox.watch import Proc
from refusion_eval.sandbox.worker import _is_nobodys


def test_a_users_processes_are_not_anybodys():
    assert not _is_nobodys(0, Proc())


def test_a_uid_without_a_user_is_free_until_a_process_has_it():
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of another uid")
    uid, _ = unprivileged_ids(os.getpid())
    assert _is_nobodys(uid, Proc())
    other = subprocess.Popen(["sleep", "60"], user=uid)
    try:
        assert not _is_nobodys(uid, Proc())
    finally:
        other.kill()
        other.wait()
    assert _is_nobodys(uid, Proc())
