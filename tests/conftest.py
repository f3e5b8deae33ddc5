"""Eight CPU devices, types checked at run time, one Hypothesis profile: set before anything imports jax or orbaxkit."""

import os

import pytest
from beartype.claw import beartype_package
from hypothesis import settings

# Typed signatures are checked whenever a test calls into the package.
beartype_package("orbaxkit")
# Machines that run tests are shared and slow; a compilation inside an example is no failure.
settings.register_profile("orbaxkit", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("orbaxkit")


def pytest_configure(config: pytest.Config) -> None:
    """Force eight CPU devices, unless this run asks for the accelerator tests."""
    if _is_accelerator_run(config):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none."""
    marked = [item for item in items if item.get_closest_marker("accelerator")]
    if not marked or (_is_accelerator_run(config) and _has_accelerator()):
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a GPU or TPU and pytest -m accelerator"))


def _is_accelerator_run(config: pytest.Config) -> bool:
    return config.getoption("markexpr", "") == "accelerator"


def _has_accelerator() -> bool:
    import jax

    return jax.default_backend() != "cpu"
