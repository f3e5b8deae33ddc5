"""The harness of the tests in several processes."""

import os

import pytest
from processes.harness import run_processes


def where_am_i(one_dies: bool):
    import jax

    if one_dies and jax.process_index() == 1:
        os._exit(7)
    return jax.process_index(), len(jax.local_devices()), len(jax.devices())


def fails():
    raise ValueError("this one failed")


def test_each_process_returns_what_it_found():
    assert [ended.value for ended in run_processes(2, where_am_i, False, devices=2)] == [(0, 2, 4), (1, 2, 4)]


def test_a_dead_process_takes_none_along():
    ended = run_processes(2, where_am_i, True, may_fail=True)
    assert [one.code for one in ended] == [0, 7]


def test_what_failed_is_told():
    with pytest.raises(AssertionError, match=r"process 0 ended with(?s:.)*this one failed"):
        run_processes(1, fails)
