"""Puts the golden vectors, which lie beside the packages, into the package that is installed."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class WithVectors(build_py):
    """Copies `fixtures` to where `ringverify vectors check` finds them in an installed package."""

    def run(self) -> None:
        """Build, and copy; an editable installation reads them where they are."""
        super().run()
        if not self.editable_mode:
            goal = Path(self.build_lib) / "ringverify" / "vectors" / "fixtures"
            shutil.copytree(HERE / "fixtures", goal, dirs_exist_ok=True)


setup(cmdclass={"build_py": WithVectors})
