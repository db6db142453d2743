"""Builds the router's wheel by its setup.py, in the working folder: build_wheel.py OUT_FOLDER

The native modules are copied from where this environment has them: compiling them takes a minute,
and says nothing about which files a wheel holds. Which modules there are is said by setup.py.
"""

import runpy
import shutil
import sys
from importlib.util import find_spec

from setuptools import Extension
from setuptools.command.build_ext import build_ext


def copied(command: build_ext, extension: Extension) -> None:
    """Takes the place of build_ext.build_extension."""
    spec = find_spec(extension.name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{extension.name} is not built in this environment")
    shutil.copy(spec.origin, command.get_ext_fullpath(extension.name))


build_ext.build_extension = copied
sys.argv = ["setup.py", "--quiet", "bdist_wheel", "--dist-dir", sys.argv[1]]
runpy.run_path("setup.py")
