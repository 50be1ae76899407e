"""Lets the distributed checks write to the terminal while pytest captures what tests print."""

import pytest

from common import distributed_processes


@pytest.fixture(scope="session", autouse=True)
def _shown(pytestconfig):
    manager = pytestconfig.pluginmanager.getplugin("capturemanager")
    if manager is not None:
        distributed_processes.shown = manager.global_and_fixture_disabled
