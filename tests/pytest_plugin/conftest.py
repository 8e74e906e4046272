"""A folder that is somebody's project, and pytest run in it as they would run it."""

import pytest
from project import Project


@pytest.fixture
def project(tmp_path):
    """With two files of implementations."""
    return Project(tmp_path).with_miniatures()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """One that the tests of a file share."""
    return Project(tmp_path_factory.mktemp("project")).with_miniatures()
