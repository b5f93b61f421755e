"""What pyproject.toml cannot say: a wheel holds what is in the sources now."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class FreshBuild(build_py):
    """Empties build/lib first: setuptools adds to what an earlier `pip install .` left there, and ships modules that are gone."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": FreshBuild})
