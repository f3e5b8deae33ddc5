"""The script for accelerators: on CPU at tiny sizes, that it runs; on an accelerator, that its bounds hold."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from device import ratios

SCRIPT = Path(__file__).with_name("run.sh")
NAMES = {"unstack", "stack", "transpose", "reset", "host_to_device"}


def run(**settings):
    environment = os.environ | {"PYTHON": sys.executable} | settings
    return subprocess.run(["sh", SCRIPT, "--tiny"], env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(shutil.which("timeout") is None, reason="the script needs timeout")
def test_everything_runs_at_tiny_sizes(tmp_path):
    done = run(OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no accelerator is here" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["ratios"]) == NAMES
    assert min(found["ratios"].values()) > 0
    assert (found["platform"], found["below"], found["is_tiny"]) == ("cpu", [], True)
    assert json.loads((tmp_path / "ratios.json").read_text()) == found


def test_a_python_without_jax_is_told(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    done = run(PYTHON=str(bare))
    assert done.returncode == 2
    assert "no JAX is here" in done.stderr


@pytest.mark.accelerator
def test_at_least_70_percent_of_the_devices_copy_bandwidth():
    found = ratios.measure(is_tiny=False)
    assert not found["below"], found
